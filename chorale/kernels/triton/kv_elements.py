"""KV elements: the numbers of a KV block, in bfloat16, float32 or e4m3 (one byte, scale 1).

e4m3 elements are read through a pointer to ``float8e4nv`` where Triton converts that type itself (NVIDIA
since 8.9), and to ``uint8`` elsewhere, with the conversions below; both give the same bytes. Values beyond
+-448 become +-448, NaN stays NaN. The type is fixed when a kernel is compiled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.triton.launch import capability_of

_LARGEST = tl.constexpr(448.0)


@triton.jit
def to_kv_element(x, kind: tl.constexpr):
    """Convert x float32 to an element of type ``kind``."""
    if kind == tl.uint8:
        element = _to_e4m3_bits(x)
    elif kind == tl.float8e4nv:
        element = tl.clamp(x, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL).to(kind)
    else:
        element = x.to(kind)
    return element


@triton.jit
def store_pairs(
    left, right, cos, sin, slot, token, heads, pairs, inside, q_ptr, kv_ptr,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, KV_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate dimensions ``pairs`` (``left``) and ``pairs`` + D/2 (``right``) of ``heads``: q, k, then v,
    which is not rotated. Store them in q [T, NUM_Q, D], or in ``slot`` of the cache."""
    half: tl.constexpr = D // 2
    turned = heads < NUM_Q + NUM_KV
    cos = tl.where(turned, cos, 1.0)
    sin = tl.where(turned, sin, 0.0)
    low = left * cos - right * sin
    high = right * cos + left * sin
    place = q_ptr + (token * NUM_Q + heads) * D + pairs
    query = inside & (heads < NUM_Q)
    tl.store(place, low.to(q_ptr.dtype.element_ty), mask=query)
    tl.store(place + half, high.to(q_ptr.dtype.element_ty), mask=query)
    chunk = (slot // KV_BLOCK) * 2 * NUM_KV + (heads - NUM_Q)  # k heads, then v heads, as in the block
    cell = kv_ptr + (chunk * KV_BLOCK + slot % KV_BLOCK) * D + pairs
    new = inside & (heads >= NUM_Q)
    tl.store(cell, to_kv_element(low, kv_ptr.dtype.element_ty), mask=new)
    tl.store(cell + half, to_kv_element(high, kv_ptr.dtype.element_ty), mask=new)


@triton.jit
def from_kv_element(element, TYPE: tl.constexpr):
    """Convert an e4m3 element to TYPE, exactly. Elements of other types are returned unchanged."""
    if element.dtype == tl.uint8:
        value = _from_e4m3_bits(element).to(TYPE)
    elif element.dtype == tl.float8e4nv:
        value = element.to(TYPE)
    else:
        value = element
    return value


@triton.jit
def from_e4m3_pair(pair, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Convert int16, two e4m3 elements, to (low, high) of TYPE, exactly. ``NATIVE``: see ``converts_pairs``.

    A tensor core takes two keys' values of a dimension in one register. If elements had one byte, a thread
    would load each alone from shared memory; it loads pairs as they are needed, and exchanges their bytes.
    """
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 lows, highs;
            .reg .b16 low, high, rest;
            prmt.b32 lows, $2, 0, 0x0020;
            prmt.b32 highs, $2, 0, 0x0031;
            mov.b32 {low, rest}, lows;
            mov.b32 {high, rest}, highs;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = _from_e4m3_bits(pair & 0xFF)
        high = _from_e4m3_bits((pair >> 8) & 0xFF)
    return low.to(TYPE), high.to(TYPE)


@triton.jit
def query_of(q, scale, kind: tl.constexpr):
    """Return (q, scale) for products with elements of ``kind``: q in the type of these products.

    A GPU converts two e4m3 elements to float16 in one instruction and to bfloat16 in seven, so q becomes
    float16. It is divided by 64, so that no q below 4 million overflows, and ``scale`` is multiplied by 64.
    This is exact except for bits of q below 2^-18.
    """
    if kind != tl.uint8 and kind != tl.int16 and kind != tl.float8e4nv:
        q = q.to(kind)
    elif q.dtype != tl.float32:
        q = (q.to(tl.float32) * 0.015625).to(tl.float16)
        scale = scale * 64.0
    return q, scale


@triton.jit
def _to_e4m3_bits(x):
    """Convert float32 to e4m3 bits, rounding to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    # At most 448; bit patterns of positive floats are ordered.
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    near = size - (120 << 23)  # e4m3 exponent, with 20 excess bits of mantissa
    normal = (near + 0x7FFFF + ((near >> 20) & 1)) >> 20
    # Below 2^-6 codes are multiples of 2^-9, the last bit of a float32 at 2^14, so an addition rounds.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _from_e4m3_bits(element):
    """Convert e4m3 bits to float32. As an 8-bit exponent, the 4-bit exponent is 120 too small."""
    bits = element.to(tl.int32)
    size = bits & 0x7F
    value = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(bits > 0x7F, -value, value)


def kernel_view(kv: torch.Tensor) -> torch.Tensor:
    """Return a pool in the type that kernels read: bytes for e4m3 where Triton lacks that type."""
    if kv.dtype == torch.float8_e4m3fn and not converts_e4m3(kv.device):
        return kv.view(torch.uint8)
    return kv


def pair_view(kv: torch.Tensor) -> torch.Tensor:
    """Return a pool as int16, pairs of elements, if it is e4m3 and its rows have enough pairs for a product;
    otherwise as ``kernel_view``."""
    is_paired = kv.dtype == torch.float8_e4m3fn and kv.shape[-1] >= 32
    return kv.view(torch.int16) if is_paired else kernel_view(kv)


def converts_pairs(device: torch.device) -> bool:
    """Return whether the device has PTX's conversion of e4m3 (Triton's interpreter has not)."""
    return capability_of(device) >= 89


def converts_e4m3(device: torch.device) -> bool:
    """Returns whether Triton supports e4m3 on the device."""
    return capability_of(device) >= 89
