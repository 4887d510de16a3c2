"""Accesses of 16 bytes to the memory of this and other GPUs, and waits for words of peers.

Addresses are integers, because those of peers come from a table.

Words that a peer sends are also the signal: memory holds ``EMPTY`` until they arrive, and the program that
has read them writes EMPTY back. As a number, EMPTY is a NaN; a sender replaces these bits with another NaN.
So there is no flag, no fence and no reply: the sum can begin one trip over NVLink after the send. Words that
stay EMPTY make the result NaN, never a number.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)  # all bits set

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
# Every 1,024th poll checks whether another thread has given up, and reads the clock.
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
    """Return PTX that polls ``count`` addresses at once. Operands: 4 * count words, the addresses, a code for
    each, which is stored to the status on a timeout (0: do not wait, the words are zeros), and the status."""
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
    lines += [f"st.relaxed.sys.global.b32 [{status[0]}], some;", "DONE:"]
    return "{\n" + "\n".join(lines) + "\n}"


def _receive_operands(count: int) -> str:
    return ",".join(["=&r"] * (4 * count) + ["l"] * count + ["r"] * count + ["l"])


_RECEIVE2, _RECEIVE4 = tl.constexpr(_receive_text(2)), tl.constexpr(_receive_text(4))
_OPERANDS2, _OPERANDS4 = tl.constexpr(_receive_operands(2)), tl.constexpr(_receive_operands(4))
# Thread n of the program writes the flag of rank n, or waits for that flag.
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
    # This timeout is longer than that of waits for words, which know the missing rank.
    + _GIVE_UP.format(status="$6", shift=1)
    + "st.relaxed.sys.global.b32 [$6], n;\nDONE:\n}"
)


# ------------------------------------------------------------------ four words


@triton.jit
def _words_at(address):
    return _long_address(address).to(tl.pointer_type(tl.int32))


@triton.jit
def _long_address(address):
    # Triton passes an address below 2 GiB as int32; the heap of Debian's Python is there.
    return tl.cast(address, tl.int64)


@triton.jit
def load4(address, there, ASM: tl.constexpr):
    """Load words of earlier kernels; zeros where ``there`` is false."""
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
def store4(address, there, words, SEND: tl.constexpr, ASM: tl.constexpr):
    """Store words. SEND: to a peer that waits for them."""
    if ASM:
        tl.inline_asm_elementwise(
            _SEND if SEND else _STORE, "=&r,l,r,r,r,r,r",
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
    """Without ASM: wait until no word at ``place`` is EMPTY, or until the limit."""
    at, code_at = _words_at(place), _words_at(status)
    there = code != 0
    limit = tl.load(_long_address(status).to(tl.pointer_type(tl.int64)) + 1, volatile=True)
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
                tl.store(code_at, missing)
                missing = 0
    return (
        tl.load(at, mask=there, other=0, volatile=True),
        tl.load(at + 1, mask=there, other=0, volatile=True),
        tl.load(at + 2, mask=there, other=0, volatile=True),
        tl.load(at + 3, mask=there, other=0, volatile=True),
    )


@triton.jit
def receive(places, codes, status, ASM: tl.constexpr):
    """Return the words at two or four addresses, once none is EMPTY. Codes: see ``_receive_text``."""
    count: tl.constexpr = len(places)
    words: tl.tuple = ()
    if ASM:
        found = tl.inline_asm_elementwise(
            _RECEIVE2 if count == 2 else _RECEIVE4, _OPERANDS2 if count == 2 else _OPERANDS4,
            places + codes + (status,), dtype=(tl.int32,) * (4 * count), is_pure=False, pack=1,
        )  # fmt: skip
        for k in tl.static_range(count):
            words += ((found[4 * k], found[4 * k + 1], found[4 * k + 2], found[4 * k + 3]),)
    else:
        for k in tl.static_range(count):
            words += (_poll4(places[k], codes[k], status),)
    return words


# ------------------------------------------------------------------ flags


@triton.jit
def publish(peers_ptr, offset, value, rank, N: tl.constexpr, ASM: tl.constexpr):
    """Write ``value`` at ``offset`` of all peers' memory, after all earlier writes of this program."""
    tl.debug_barrier()
    if ASM:
        tl.inline_asm_elementwise(
            _PUBLISH, "=&r,l,l,r,r,r", (peers_ptr.to(tl.int64), tl.cast(offset, tl.int64), value, rank, N),
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        for other in tl.static_range(N):
            if rank != other:
                to = _words_at(tl.load(peers_ptr + other) + offset)
                tl.atomic_xchg(to, value, sem="release", scope="sys")


@triton.jit
def wait_for_flags(first, stride, value, rank, status, N: tl.constexpr, ASM: tl.constexpr):
    """Wait until the flags of all peers, ``stride`` bytes apart, are at least ``value``."""
    if ASM:
        tl.inline_asm_elementwise(
            _AWAIT, "=&r,l,r,r,r,r,l", (first, stride, value, rank, N, status),
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        code_at = _words_at(status)
        limit = tl.load(_long_address(status).to(tl.pointer_type(tl.int64)) + 1, volatile=True) * 2
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
                        tl.store(code_at, rank * 0 + other + 1)
                        waiting = rank < 0
    tl.debug_barrier()
