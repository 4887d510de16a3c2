"""Accesses of 16 bytes to this and to other GPUs' memory, and waiting for what a peer writes.

A tensor's lane holds eight consecutive columns of a row, as a tuple of eight tensors: no layout has to be
converted between a load, the arithmetic and a store. In memory they are float32 (WIDE: two accesses) or
bfloat16 (one). Addresses are integers, because those of peers come from a table.

Words that a peer sends are their own signal: a place holds ``EMPTY`` until they arrive, and whoever has read
them writes it back. As a number, EMPTY is a NaN; a sender replaces the same bits by another NaN. So there is
no flag, no fence and no way back: the sum can begin one trip over NVLink after the send. A place that stays
EMPTY makes the result NaN, never a number.

With ASM the accesses are PTX. Without (Triton's interpreter, AMD) they are Triton's own volatile ones, and a
waiting program polls as a whole; ``limit`` then counts polls instead of nanoseconds.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)  # all bits set
OTHER_NAN = tl.constexpr(0x7FFFFFFF)  # the same, positive: two NaN in bfloat16, too

_LOAD = tl.constexpr("""{
.reg .pred there; setp.ne.s32 there, $5, 0;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
@there ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")
_STORE = tl.constexpr("""{
.reg .pred there; setp.ne.s32 there, $2, 0; mov.b32 $0, 0;
@there st.global.v4.b32 [$1], {$3, $4, $5, $6};
}""")
_SEND = tl.constexpr("""{
.reg .pred there; setp.ne.s32 there, $2, 0; mov.b32 $0, 0;
@there st.relaxed.sys.global.v4.b32 [$1], {$3, $4, $5, $6};
}""")
# Every 1,024th poll looks whether another thread has given up, and at the clock.
_GIVE_UP = """
add.u32 polls, polls, 1; and.b32 some, polls, 1023; setp.ne.s32 more, some, 0;
@more bra AGAIN;
ld.relaxed.sys.global.b32 some, [{status}]; setp.ne.s32 more, some, 0;
@more bra DONE;
mov.u64 now, %globaltimer; setp.eq.s32 more, polls, 1024;
@more mov.b64 start, now;
sub.u64 now, now, start; ld.relaxed.sys.global.b64 limit, [{status} + 8]; shl.b64 limit, limit, {shift};
setp.lt.u64 more, now, limit;
@more bra AGAIN;
"""


def _receive_text(count: int) -> str:
    """Polls ``count`` places at once. Operands: 4 * count words, the places, then for each what is left at the
    status if it is given up (0: there is nothing to wait for, and the words are zeros), and the status."""
    places, codes, status = ([f"${n * count + k}" for k in range(count)] for n in (4, 5, 6))
    words = [[f"${4 * k + n}" for n in range(4)] for k in range(count)]
    lines = [
        f".reg .pred more, {', '.join(f'there{k}, empty{k}' for k in range(count))};",
        ".reg .b32 polls, some; .reg .b64 now, start, limit;",
        "mov.b32 polls, 0; mov.b64 start, 0;",
    ]
    for k in range(count):
        lines.append(f"setp.ne.s32 there{k}, {codes[k]}, 0;")
        lines += [f"mov.b32 {word}, 0;" for word in words[k]]
    lines.append("AGAIN:")
    for k in range(count):
        lines.append(f"@there{k} ld.relaxed.sys.global.v4.b32 {{{', '.join(words[k])}}}, [{places[k]}];")
    for k in range(count):
        lines.append(f"setp.eq.s32 empty{k}, {words[k][0]}, -1;")
        lines += [f"setp.eq.or.s32 empty{k}, {word}, -1, empty{k};" for word in words[k][1:]]
    lines.append("mov.pred more, empty0;")
    lines += [f"or.pred more, more, empty{k};" for k in range(1, count)]
    lines += ["@!more bra DONE;", _GIVE_UP.format(status=status[0], shift=0)]
    lines += [f"@empty{k} mov.b32 some, {codes[k]};" for k in reversed(range(count))]
    lines += [f"atom.relaxed.sys.global.cas.b32 some, [{status[0]}], 0, some;", "DONE:"]
    return "{\n" + "\n".join(lines) + "\n}"


_RECEIVE2, _RECEIVE4 = tl.constexpr(_receive_text(2)), tl.constexpr(_receive_text(4))
# Thread n of the program writes the flag of rank n, or waits for it.
_PUBLISH = tl.constexpr("""{
.reg .pred mine; .reg .b32 n; .reg .b64 to; mov.u32 n, %tid.x; mov.b32 $0, 0;
setp.lt.u32 mine, n, $5; setp.ne.and.u32 mine, n, $4, mine;
@!mine bra DONE;
mul.wide.u32 to, n, 8; add.s64 to, to, $1; ld.global.b64 to, [to]; add.s64 to, to, $2;
st.release.sys.global.b32 [to], $3;
DONE:
}""")
_AWAIT = tl.constexpr(
    """{
.reg .pred mine, more; .reg .b32 n, polls, some; .reg .b64 from, now, start, limit;
mov.u32 n, %tid.x; mov.b32 $0, 0; mov.b32 polls, 0; mov.b64 start, 0;
setp.lt.u32 mine, n, $5; setp.ne.and.u32 mine, n, $4, mine;
@!mine bra DONE;
mul.wide.u32 from, n, $2; add.s64 from, from, $1; add.u32 n, n, 1;
AGAIN:
ld.acquire.sys.global.b32 some, [from]; sub.s32 some, some, $3; setp.lt.s32 more, some, 0;
@!more bra DONE;
"""
    + _GIVE_UP.format(status="$6", shift=1)  # later than those that wait for words: they know who is missing
    + "atom.relaxed.sys.global.cas.b32 some, [$6], 0, n;\nDONE:\n}"
)
_PREFETCH = tl.constexpr("""{
.reg .pred first; .reg .b32 n; mov.u32 n, %tid.x; setp.eq.s32 first, n, 0; mov.b32 $0, 0;
@first cp.async.bulk.prefetch.L2.global [$1], $2;
}""")


# ------------------------------------------------------------------ four words


@triton.jit
def _words_at(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _load4(address, there, ASM: tl.constexpr):
    """What kernels before this one wrote: zeros where ``there`` is false."""
    if ASM:
        words = tl.inline_asm_elementwise(
            _LOAD, "=&r,=&r,=&r,=&r,l,r", (address, there.to(tl.int32)), is_pure=False, pack=1,
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        )  # fmt: skip
    else:
        at = _words_at(address)
        words = (
            tl.load(at, mask=there, other=0),
            tl.load(at + 1, mask=there, other=0),
            tl.load(at + 2, mask=there, other=0),
            tl.load(at + 3, mask=there, other=0),
        )
    return words


@triton.jit
def _store4(address, there, words, SEND: tl.constexpr, ASM: tl.constexpr):
    """SEND: to a peer that waits for these words."""
    if ASM:
        tl.inline_asm_elementwise(
            _SEND if SEND else _STORE, "=r,l,r,r,r,r,r",
            (address, there.to(tl.int32), words[0], words[1], words[2], words[3]),
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        at = _words_at(address)
        tl.store(at, words[0], mask=there)
        tl.store(at + 1, words[1], mask=there)
        tl.store(at + 2, words[2], mask=there)
        tl.store(at + 3, words[3], mask=there)


@triton.jit
def _poll4(place, code, status):
    """Without ASM: waits until no word at ``place`` is EMPTY, or too long."""
    at, code_at = _words_at(place), _words_at(status)
    there = code != 0
    limit = tl.load(status.to(tl.pointer_type(tl.int64)) + 1, volatile=True)
    polls = limit * 0
    missing = 1
    while missing > 0:
        w0 = tl.load(at, mask=there, other=0, volatile=True)
        w1 = tl.load(at + 1, mask=there, other=0, volatile=True)
        w2 = tl.load(at + 2, mask=there, other=0, volatile=True)
        w3 = tl.load(at + 3, mask=there, other=0, volatile=True)
        empty = (w0 == EMPTY) | (w1 == EMPTY) | (w2 == EMPTY) | (w3 == EMPTY)
        missing = tl.max(tl.max(tl.where(empty, code, 0), 1), 0)
        polls += 1
        if missing > 0:
            if tl.load(code_at, volatile=True) != 0:
                missing = 0
            elif polls >= limit:
                tl.atomic_cas(code_at, 0, missing, sem="relaxed", scope="sys")
                missing = 0
    return (
        tl.load(at, mask=there, other=0, volatile=True),
        tl.load(at + 1, mask=there, other=0, volatile=True),
        tl.load(at + 2, mask=there, other=0, volatile=True),
        tl.load(at + 3, mask=there, other=0, volatile=True),
    )


@triton.jit
def _receive(places, codes, status, COUNT: tl.constexpr, ASM: tl.constexpr):
    """Words at 2 or 4 (COUNT) places, a tuple of them, once none is EMPTY. Codes: see ``_receive_text``."""
    if not ASM:
        first = _poll4(places[0], codes[0], status)
        second = _poll4(places[1], codes[1], status)
        if COUNT == 2:
            words = (first, second)
        else:
            words = (first, second, _poll4(places[2], codes[2], status), _poll4(places[3], codes[3], status))
    elif COUNT == 2:
        w = tl.inline_asm_elementwise(
            _RECEIVE2, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l,r,r,l",
            (places[0], places[1], codes[0], codes[1], status), is_pure=False, pack=1,
            dtype=(
                tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32,
            ),
        )  # fmt: skip
        words = ((w[0], w[1], w[2], w[3]), (w[4], w[5], w[6], w[7]))
    else:
        w = tl.inline_asm_elementwise(
            _RECEIVE4, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r,l",
            (places[0], places[1], places[2], places[3], codes[0], codes[1], codes[2], codes[3], status),
            is_pure=False, pack=1,
            dtype=(
                tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32,
                tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32,
            ),
        )  # fmt: skip
        words = (
            (w[0], w[1], w[2], w[3]), (w[4], w[5], w[6], w[7]),
            (w[8], w[9], w[10], w[11]), (w[12], w[13], w[14], w[15]),
        )  # fmt: skip
    return words


# ------------------------------------------------------------------ eight columns


@triton.jit
def _floats(words):
    """Four words of bfloat16 -> eight columns."""
    return (
        (words[0] << 16).to(tl.float32, bitcast=True),
        (words[0] & -65536).to(tl.float32, bitcast=True),
        (words[1] << 16).to(tl.float32, bitcast=True),
        (words[1] & -65536).to(tl.float32, bitcast=True),
        (words[2] << 16).to(tl.float32, bitcast=True),
        (words[2] & -65536).to(tl.float32, bitcast=True),
        (words[3] << 16).to(tl.float32, bitcast=True),
        (words[3] & -65536).to(tl.float32, bitcast=True),
    )


@triton.jit
def _pair(low, high):
    left = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    right = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    return (left & 0xFFFF) | (right << 16)


@triton.jit
def _packed(v):
    return _pair(v[0], v[1]), _pair(v[2], v[3]), _pair(v[4], v[5]), _pair(v[6], v[7])


@triton.jit
def _bits(a, b, c, d):
    return (
        a.to(tl.int32, bitcast=True),
        b.to(tl.int32, bitcast=True),
        c.to(tl.int32, bitcast=True),
        d.to(tl.int32, bitcast=True),
    )


@triton.jit
def _full(words):
    """No word is EMPTY."""
    return (
        tl.where(words[0] == EMPTY, OTHER_NAN, words[0]),
        tl.where(words[1] == EMPTY, OTHER_NAN, words[1]),
        tl.where(words[2] == EMPTY, OTHER_NAN, words[2]),
        tl.where(words[3] == EMPTY, OTHER_NAN, words[3]),
    )


@triton.jit
def _joined(low, high):
    """Two times four words of float32 -> eight columns."""
    return (
        low[0].to(tl.float32, bitcast=True),
        low[1].to(tl.float32, bitcast=True),
        low[2].to(tl.float32, bitcast=True),
        low[3].to(tl.float32, bitcast=True),
        high[0].to(tl.float32, bitcast=True),
        high[1].to(tl.float32, bitcast=True),
        high[2].to(tl.float32, bitcast=True),
        high[3].to(tl.float32, bitcast=True),
    )


@triton.jit
def load8(address, there, WIDE: tl.constexpr, ASM: tl.constexpr):
    if WIDE:
        values = _joined(_load4(address, there, ASM), _load4(address + 16, there, ASM))
    else:
        values = _floats(_load4(address, there, ASM))
    return values


@triton.jit
def store8(address, there, v, WIDE: tl.constexpr, ASM: tl.constexpr):
    if WIDE:
        _store4(address, there, _bits(v[0], v[1], v[2], v[3]), False, ASM)
        _store4(address + 16, there, _bits(v[4], v[5], v[6], v[7]), False, ASM)
    else:
        _store4(address, there, _packed(v), False, ASM)


@triton.jit
def send8(address, there, v, WIDE: tl.constexpr, ASM: tl.constexpr):
    if WIDE:
        _store4(address, there, _full(_bits(v[0], v[1], v[2], v[3])), True, ASM)
        _store4(address + 16, there, _full(_bits(v[4], v[5], v[6], v[7])), True, ASM)
    else:
        _store4(address, there, _full(_packed(v)), True, ASM)


@triton.jit
def clear8(address, there, WIDE: tl.constexpr, ASM: tl.constexpr):
    """Makes a place ready for the call after the next."""
    empty = there.to(tl.int32) * 0 + EMPTY
    _store4(address, there, (empty, empty, empty, empty), False, ASM)
    if WIDE:
        _store4(address + 16, there, (empty, empty, empty, empty), False, ASM)


@triton.jit
def rounded8(v, WIDE: tl.constexpr):
    """As a peer receives them."""
    if WIDE:
        values = v
    else:
        values = _floats(_packed(v))
    return values


@triton.jit
def add8(a, b):
    return (
        a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3],
        a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7],
    )  # fmt: skip


@triton.jit
def sub8(a, b):
    return (
        a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3],
        a[4] - b[4], a[5] - b[5], a[6] - b[6], a[7] - b[7],
    )  # fmt: skip


@triton.jit
def select8(condition, a, b):
    return (
        tl.where(condition, a[0], b[0]), tl.where(condition, a[1], b[1]),
        tl.where(condition, a[2], b[2]), tl.where(condition, a[3], b[3]),
        tl.where(condition, a[4], b[4]), tl.where(condition, a[5], b[5]),
        tl.where(condition, a[6], b[6]), tl.where(condition, a[7], b[7]),
    )  # fmt: skip


@triton.jit
def dot8(a, b):
    """Sums of the products of a row [ROWS]."""
    products = a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
    products += a[4] * b[4] + a[5] * b[5] + a[6] * b[6] + a[7] * b[7]
    return tl.sum(products, 1)


@triton.jit
def normed8(x, norm, eps, H: tl.constexpr):
    """The RMS norm of rows x times ``norm``."""
    scale = (1.0 / tl.sqrt(dot8(x, x) / H + eps))[:, None]
    return (
        x[0] * scale * norm[0], x[1] * scale * norm[1], x[2] * scale * norm[2], x[3] * scale * norm[3],
        x[4] * scale * norm[4], x[5] * scale * norm[5], x[6] * scale * norm[6], x[7] * scale * norm[7],
    )  # fmt: skip


# ------------------------------------------------------------------ what both kernels do


@triton.jit
def part8(
    y_ptr,  # float32 or bfloat16
    b_ptr,  # [H] (if HAS_BIAS)
    rows,  # [ROWS, 1]
    lanes,  # [1, LANES]
    inside,
    split_stride,
    row_stride,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr,
):
    """This rank's part of rows: the sum of y's splits, in order, and the bias."""
    wide: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    bytes_each: tl.constexpr = 4 if wide else 2
    first = y_ptr.to(tl.int64) + (rows.to(tl.int64) * row_stride + lanes * 8) * bytes_each
    total = load8(first, inside, wide, ASM)
    for split in tl.static_range(1, SPLITS):
        place = first + tl.cast(split, tl.int64) * split_stride * bytes_each
        total = add8(total, load8(place, inside, wide, ASM))
    if HAS_BIAS:
        bias_wide: tl.constexpr = b_ptr.dtype.element_ty == tl.float32
        bias_at = b_ptr.to(tl.int64) + lanes * (32 if bias_wide else 16) + rows.to(tl.int64) * 0
        total = add8(total, load8(bias_at, inside, bias_wide, ASM))
    return total


@triton.jit
def _code_of(other, inside, rank):
    return tl.where(inside & (rank != other), other + 1, 0)


@triton.jit
def sum_of_ranks8(
    own,  # this rank's part, as it was sent
    received,  # address of rank 0's words
    from_bytes,  # from a rank's words to the next one's
    inside,
    rank,
    status,
    N: tl.constexpr,
    WIDE: tl.constexpr,
    ASM: tl.constexpr,
):
    """All ranks' parts, added in the order of the ranks. Up to four places are polled at once."""
    together: tl.constexpr = 2 if WIDE or N == 2 else 4
    total = own
    for begin in tl.static_range(0, N, together):
        a = received + tl.cast(begin, tl.int64) * from_bytes
        b = a + from_bytes
        a_code, b_code = _code_of(begin, inside, rank), _code_of(begin + 1, inside, rank)
        if WIDE:
            w = _receive((a, a + 16, b, b + 16), (a_code, a_code, b_code, b_code), status, 4, ASM)
            first, second = _joined(w[0], w[1]), _joined(w[2], w[3])
        elif together == 2:
            w = _receive((a, b), (a_code, b_code), status, 2, ASM)
            first, second = _floats(w[0]), _floats(w[1])
        else:
            c_code, d_code = _code_of(begin + 2, inside, rank), _code_of(begin + 3, inside, rank)
            places = (a, b, b + from_bytes, b + 2 * from_bytes)
            w = _receive(places, (a_code, b_code, c_code, d_code), status, 4, ASM)
            first, second = _floats(w[0]), _floats(w[1])
        first = select8(rank == begin, own, first)
        if begin == 0:
            total = first
        else:
            total = add8(total, first)
        total = add8(total, select8(rank == begin + 1, own, second))
        if together == 4:
            total = add8(total, select8(rank == begin + 2, own, _floats(w[2])))
            total = add8(total, select8(rank == begin + 3, own, _floats(w[3])))
    return total


@triton.jit
def clear_ranks8(
    received, from_bytes, inside, rank, N: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr
):
    for other in tl.static_range(N):
        there = _code_of(other, inside, rank) != 0
        clear8(received + tl.cast(other, tl.int64) * from_bytes, there, WIDE, ASM)


# ------------------------------------------------------------------ flags


@triton.jit
def publish(peers_ptr, offset, value, rank, N: tl.constexpr, ASM: tl.constexpr):
    """Writes ``value`` at ``offset`` of every peer's memory, after everything that this program has written."""
    tl.debug_barrier()
    if ASM:
        tl.inline_asm_elementwise(
            _PUBLISH, "=r,l,l,r,r,r", (peers_ptr.to(tl.int64), offset, value, rank, N),
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        for other in tl.static_range(N):
            if rank != other:
                to = _words_at(tl.load(peers_ptr + other) + offset)
                tl.atomic_xchg(to, value, sem="release", scope="sys")


@triton.jit
def wait_for_flags(first, stride, value, rank, status, N: tl.constexpr, ASM: tl.constexpr):
    """Waits until the flags of all peers, ``stride`` bytes apart, are at least ``value``."""
    if ASM:
        tl.inline_asm_elementwise(
            _AWAIT, "=&r,l,r,r,r,r,l", (first, stride, value, rank, N, status),
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        code_at = _words_at(status)
        limit = tl.load(status.to(tl.pointer_type(tl.int64)) + 1, volatile=True) * 2
        for other in tl.static_range(N):
            polls = limit * 0
            waiting = rank != other
            while waiting:
                found = tl.atomic_add(_words_at(first + other * stride), 0, sem="acquire", scope="sys")
                waiting = found - value < 0
                polls += 1
                if waiting:
                    if tl.load(code_at, volatile=True) != 0:
                        waiting = rank < 0
                    elif polls >= limit:
                        tl.atomic_cas(code_at, 0, rank * 0 + other + 1, sem="relaxed", scope="sys")
                        waiting = rank < 0
    tl.debug_barrier()


@triton.jit
def prefetch(address, size, ASM: tl.constexpr):
    """Fetches ``size`` bytes (a multiple of 16) into the L2; Hopper and later."""
    if ASM:
        tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", (address, size), dtype=tl.int32, is_pure=False, pack=1)
