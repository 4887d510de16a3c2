"""Rows as lanes of eight consecutive columns: a tuple of eight tensors [ROWS, LANES] float32.

Loads, arithmetic and stores need no conversion of layouts. In memory the columns are float32 (WIDE: two
accesses of 16 bytes) or bfloat16 (one access).
"""

from __future__ import annotations

import triton
import triton.language as tl

from chorale.kernels.triton.reduce.words import EMPTY, load4, receive, store4

OTHER_NAN = tl.constexpr(0x7FFFFFFF)  # EMPTY, positive


@triton.jit
def _floats(words):
    """Convert four words of bfloat16 to eight columns."""
    v: tl.tuple = ()
    for n in tl.static_range(4):
        v += ((words[n] << 16).to(tl.float32, bitcast=True), (words[n] & -65536).to(tl.float32, bitcast=True))
    return v


@triton.jit
def _rounded(x, ASM: tl.constexpr):
    """Round float32 to bfloat16 bits, to nearest even; any NaN becomes a NaN other than EMPTY."""
    if ASM:
        bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:  # Triton's interpreter would truncate
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x != x, 0x7FC0, (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16) & 0xFFFF
    return bits


@triton.jit
def _packed(v, ASM: tl.constexpr):
    words: tl.tuple = ()
    for n in tl.static_range(4):
        words += (_rounded(v[2 * n], ASM) | (_rounded(v[2 * n + 1], ASM) << 16),)
    return words


@triton.jit
def _bits(v):
    """Convert columns of float32 to words."""
    words: tl.tuple = ()
    for n in tl.static_range(len(v)):
        words += (v[n].to(tl.int32, bitcast=True),)
    return words


@triton.jit
def full4(words):
    """Return the words, of which none is EMPTY."""
    full: tl.tuple = ()
    for n in tl.static_range(4):
        full += (tl.where(words[n] == EMPTY, OTHER_NAN, words[n]),)
    return full


@triton.jit
def _columns(words):
    """Convert words of float32 to columns."""
    v: tl.tuple = ()
    for n in tl.static_range(len(words)):
        v += (words[n].to(tl.float32, bitcast=True),)
    return v


@triton.jit
def load8(address, there, WIDE: tl.constexpr, ASM: tl.constexpr):
    if WIDE:
        values = _columns(load4(address, there, ASM) + load4(address + 16, there, ASM))
    else:
        values = _floats(load4(address, there, ASM))
    return values


@triton.jit
def store8(address, there, v, WIDE: tl.constexpr, ASM: tl.constexpr):
    if WIDE:
        store4(address, there, _bits(v[:4]), False, ASM)
        store4(address + 16, there, _bits(v[4:]), False, ASM)
    else:
        store4(address, there, _packed(v, ASM), False, ASM)


@triton.jit
def send8(address, there, v, WIDE: tl.constexpr, ASM: tl.constexpr):
    if WIDE:
        store4(address, there, full4(_bits(v[:4])), True, ASM)
        store4(address + 16, there, full4(_bits(v[4:])), True, ASM)
    else:
        store4(address, there, _packed(v, ASM), True, ASM)


@triton.jit
def clear8(address, there, WIDE: tl.constexpr, ASM: tl.constexpr):
    """Set words to EMPTY for the call after the next."""
    empty = there.to(tl.int32) * 0 + EMPTY
    store4(address, there, (empty, empty, empty, empty), False, ASM)
    if WIDE:
        store4(address + 16, there, (empty, empty, empty, empty), False, ASM)


@triton.jit
def rounded8(v, WIDE: tl.constexpr, ASM: tl.constexpr):
    """Round columns as a peer receives them."""
    if WIDE:
        values = v
    else:
        values = _floats(_packed(v, ASM))
    return values


@triton.jit
def add8(a, b):
    v: tl.tuple = ()
    for n in tl.static_range(8):
        v += (a[n] + b[n],)
    return v


@triton.jit
def sub8(a, b):
    v: tl.tuple = ()
    for n in tl.static_range(8):
        v += (a[n] - b[n],)
    return v


@triton.jit
def select8(condition, a, b):
    v: tl.tuple = ()
    for n in tl.static_range(8):
        v += (tl.where(condition, a[n], b[n]),)
    return v


@triton.jit
def multiply8(a, b):
    v: tl.tuple = ()
    for n in tl.static_range(8):
        v += (a[n] * b[n],)
    return v


@triton.jit
def dot_lanes8(a, b):
    """Return the sums of products within lanes [ROWS, LANES]."""
    p = multiply8(a, b)
    return p[0] + p[1] + p[2] + p[3] + p[4] + p[5] + p[6] + p[7]


@triton.jit
def normed8(x, norm, eps, H: tl.constexpr):
    """Return the RMS norm of rows x times ``norm``."""
    scale = (1.0 / tl.sqrt(tl.sum(dot_lanes8(x, x), 1) / H + eps))[:, None]
    v: tl.tuple = ()
    for n in tl.static_range(8):
        v += (x[n] * scale * norm[n],)
    return v


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
    """Return this rank's part of rows: the sum of y's splits, in order, and the bias."""
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
def own_part8(
    y_ptr,  # float32 [SPLITS, rows, H]: SPLITS / K parts for each of a row's K pairs
    pair_ids_ptr,  # [rows, K] int64
    rows,  # [ROWS, 1]
    there,  # [ROWS, 1]: which of them exist
    lanes,
    inside,
    first_expert,
    num_experts,
    split_stride,
    row_stride,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    ASM: tl.constexpr,
):
    """``part8`` for a rank with whole experts, which lacks the parts of other experts' pairs."""
    first = y_ptr.to(tl.int64) + (rows.to(tl.int64) * row_stride + lanes * 8) * 4
    total = load8(first, inside & (rows < 0), True, ASM)  # zeros
    for k in tl.static_range(K):
        expert = tl.load(pair_ids_ptr + rows * K + k, mask=there, other=-1).to(tl.int32) - first_expert
        own = inside & (expert >= 0) & (expert < num_experts)
        for n in tl.static_range(SPLITS // K):
            place = first + tl.cast(k * (SPLITS // K) + n, tl.int64) * split_stride * 4
            total = add8(total, load8(place, own, True, ASM))
    return total


@triton.jit
def code_of(other, inside, rank):
    return tl.where(inside & (rank != other), other + 1, 0)


@triton.jit
def sum_of_ranks8(
    own,  # this rank's part, rounded as sent
    received,  # address of rank 0's words
    from_bytes,  # bytes per rank
    inside,
    rank,
    status,
    N: tl.constexpr,
    WIDE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the sum of all ranks' parts, in the order of ranks. Up to four ranks' words are polled at
    once."""
    together: tl.constexpr = 2 if WIDE or N == 2 else 4
    total = own
    for begin in tl.static_range(0, N, together):
        a = received + tl.cast(begin, tl.int64) * from_bytes
        b = a + from_bytes
        a_code, b_code = code_of(begin, inside, rank), code_of(begin + 1, inside, rank)
        if WIDE:
            w = receive((a, a + 16, b, b + 16), (a_code, a_code, b_code, b_code), status, ASM)
            first, second = _columns(w[0] + w[1]), _columns(w[2] + w[3])
        elif together == 2:
            w = receive((a, b), (a_code, b_code), status, ASM)
            first, second = _floats(w[0]), _floats(w[1])
        else:
            c_code, d_code = code_of(begin + 2, inside, rank), code_of(begin + 3, inside, rank)
            places = (a, b, b + from_bytes, b + 2 * from_bytes)
            w = receive(places, (a_code, b_code, c_code, d_code), status, ASM)
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
def clear_ranks8(received, from_bytes, inside, rank, N: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr):
    for other in tl.static_range(N):
        there = code_of(other, inside, rank) != 0
        clear8(received + tl.cast(other, tl.int64) * from_bytes, there, WIDE, ASM)
