"""The PTX of ``skinny_ptx`` on a CPU: all warps of one program, up to its barrier, and after."""

from __future__ import annotations

import importlib.util
import inspect
import re
from typing import Any

import numpy as np
import pytest

from tests.support.kernels.ptx_machine import LANES, Lanes, Warp, to_bfloat16
from tests.support.kernels.skinny_machine import run_block

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def bfloat16_bytes(values: Lanes) -> tuple[bytes, Lanes]:
    """The bytes of values rounded to bfloat16, and what they are then."""
    short = to_bfloat16(values).astype(np.uint16)
    return short.tobytes(), (short.astype(np.uint32) << 16).view(np.float32)


def compact_rows(weight: Lanes) -> tuple[bytes, Lanes, Lanes]:
    """The words of ``CompactRows``, scales, and weights."""
    import torch

    from chorale.kernels.triton.dense.compact import pack_rows
    from tests.support.kernels.skinny_machine import unpack_rows

    rows = pack_rows(torch.from_numpy(weight).bfloat16())
    return rows.words.numpy().tobytes(), rows.scales.numpy(), unpack_rows(rows).numpy()


def check(p: Any, tokens: int, first: int, rows: int) -> None:
    """One program of ``skinny_fused``'s two kernels, against float64. Operands as the kernels make them."""
    from chorale.kernels.triton.dense.compact import SCALE
    from chorale.kernels.triton.dense.skinny_ptx import product_text

    random = np.random.default_rng(0)
    depth, dim, base = p.depth, p.head_dim, Warp.BASE
    weight_bytes, weight = bfloat16_bytes(random.standard_normal((rows, depth)))
    scales = np.ones(rows, np.float32)
    if p.is_compact:
        weight_bytes, scales, weight = compact_rows(weight)
    bias_bytes, bias = bfloat16_bytes(random.standard_normal(rows))
    x = random.standard_normal((tokens, depth)).astype(np.float32)
    norm = (1 + 0.1 * random.standard_normal(depth)).astype(np.float32)
    early = random.standard_normal((tokens, max(rows, dim))).astype(np.float32)  # residual, or rope
    slots = np.arange(tokens, dtype=np.int64) + 77
    x_bytes, near = (x.tobytes(), x) if p.norm else bfloat16_bytes(x)
    if p.norm:
        near = bfloat16_bytes(x * norm)[1]
    pieces, at, memory = [weight_bytes, bias_bytes, x_bytes, norm.tobytes(), early.tobytes()], [], b""
    for piece in [*pieces, slots.tobytes(), scales.tobytes()]:
        memory += bytes(-len(memory) % 256)
        at.append(base + len(memory))
        memory += piece
    size = 4 if p.norm else 2
    operands, expected = [], []
    for warp in range(p.warps):
        g, t = LANES // 4, LANES % 4
        column = warp * 32 * p.parts + t * 8
        if p.is_staged:
            lanes = 32 // p.rounds_per_load
            column = (LANES // lanes * p.warps + warp) * 64 + LANES % lanes * (64 // lanes)
        row = g // 2 + g % 2 * (dim // 2) if dim else g
        pick = warp % (p.units * p.columns)
        unit, token = first + pick // p.columns, pick % p.columns * 8 + g
        there = np.minimum(token, tokens - 1)
        weights = at[0] + 2 * (row * depth + column)
        if p.is_compact:
            weights = at[0] + (first * p.chunks + warp) * 768 + LANES * 16
        values = [weights, np.full(32, first), at[3] + 4 * column]
        for n in range(p.columns):
            one = 0 if p.is_staged else np.minimum(g + 8 * n, tokens - 1)
            values.append(at[2] + size * (one * depth + column))
        if dim:
            left = unit // (dim // 8) * dim + unit % (dim // 8) * 4 + t
            right, pair = left + dim // 2, left % dim
            values += [at[1] + 2 * left, at[1] + 2 * right]
            values += [at[4] + 4 * (there * early.shape[1] + pair + k * dim // 2) for k in (0, 1)]
            values.append(at[5] + 8 * there)
            loaded = [early[there, pair], early[there, pair + dim // 2]]
        else:
            left = unit // 8 * 64 + unit % 8 * 4 + t if p.is_compact else unit * 8 + 2 * t
            right = left + (32 if p.is_compact else 1)
            values += [at[1] + 2 * left, at[1] + 2 * right]
            values += [at[4] + 4 * (there * early.shape[1] + each) for each in (left, right)]
            loaded = [early[there, left], early[there, right]]
        if p.is_compact:
            values += [at[6] + 4 * left, at[6] + 4 * right]
            factors = SCALE * np.stack((scales[left], scales[right]))
        else:
            factors = np.ones((2, 32))
        operands.append({f"${p.outputs + n}": np.asarray(value) for n, value in enumerate(values)})
        exact = near.astype(np.float64) @ weight.T.astype(np.float64)
        results = [exact[there, left], exact[there, right]]
        if p.norm:
            results.append((x.astype(np.float64) ** 2).sum(1)[there])
        results += [bias[left], bias[right], *loaded]
        expected.append((results, slots[there] if dim else None, factors))
    warps = run_block(product_text(p), memory, operands)
    for warp, (results, slot, factors) in zip(warps, expected, strict=True):
        for n, result in enumerate(results):
            found = warp.number(f"${n}") * (factors[n] if n < 2 else 1)
            np.testing.assert_allclose(found, result, rtol=2e-5, atol=2e-4)
        if slot is not None:
            np.testing.assert_array_equal(warp.get(f"${len(results)}"), slot.astype(np.uint64))


HEADS = {"NUM_Q": 64, "NUM_KV": 8, "D": 64, "KV_BLOCK": 64, "K": 2880}
SHAPES = [
    (2, 4, 6, 2),
    (1, 4, 4, 1),
    (4, 8, 12, 3),
    (3, 8, 7, 1),
    (5, 8, 10, 2),
    (4, 4, 8, 9),
]


# Tokens, head size, compact rows or not, loads of 16 bytes before the wait and before the first product.
CODE = [(8, 64, False, 4, 12), (16, 0, False, 0, 6), (8, 64, True, 8, 24), (1, 64, True, 3, 6)]


@pytest.mark.parametrize(("tokens", "dim", "is_compact", "norms", "loads"), CODE)
def test_the_machine_code(tokens: int, dim: int, is_compact: bool, norms: int, loads: int) -> None:
    """For sm_90: weights start before the wait, inputs after it, and inputs stay ahead of their use."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from chorale.kernels.triton.dense import skinny_fused
    from chorale.kernels.triton.tuning import SkinnyConfig
    from tests.support.kernels.hazards import disassemble

    tile = SkinnyConfig(2, 8, 6 if is_compact else 12, 2)
    product = skinny_fused.product_of(tile, tokens, 2880, dim, True, is_compact=is_compact)
    constants = dict(skinny_fused.constants_of(product))
    if not is_compact:
        constants["scale_ptr"] = None
    warps = constants.pop("num_warps")
    types = dict.fromkeys(("x_ptr", "rope_ptr", "norm_ptr", "scale_ptr"), "*fp32")
    types |= {"slots_ptr": "*i64", "eps": "fp32", "w_ptr": "*i32" if is_compact else "*bf16"}
    if dim:
        kernel, constants = skinny_fused._qkv_kernel, constants | HEADS
    else:
        kernel = skinny_fused._project_kernel
        constants |= {"K": 2880, "HAS_BIAS": True, "ADD": True}
        types = {"out_ptr": "*fp32"}
    names = list(inspect.signature(kernel.fn).parameters)
    plain = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in names} | types
    signature = plain | dict.fromkeys(constants, "constexpr")
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if name.endswith("_ptr")}
    values = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, values, aligned),
        GPUTarget("cuda", 90, 32),
        {"num_warps": warps, "enable_fp_fusion": True},
    )
    assert compiled.metadata.shared == 0  # the ring is static, and may have all 48 KiB
    code = disassemble(compiled.asm["cubin"])
    assert not re.search(r"\b(?:LDL|STL)\b", code)
    found = re.findall(r"\b(LDGSTS|ACQBULK|LDG\.E\.128|HMMA|PREEXIT)\b", code)
    wait, first = found.index("ACQBULK"), found.index("HMMA")
    assert found[:wait].count("LDGSTS") == 12
    assert found[:wait].count("LDG.E.128") == norms
    assert found[:first].count("LDG.E.128") >= loads
    assert found.index("PREEXIT") > max(n for n, name in enumerate(found) if name == "HMMA")


@pytest.mark.parametrize(
    ("shape", "tokens"), [*((shape, 13) for shape in SHAPES), (SHAPES[0], 1), (SHAPES[0], 8), (SHAPES[1], 1)]
)
def test_one_program(shape: tuple[int, ...], tokens: int) -> None:
    from chorale.kernels.triton.dense.skinny_fused import product_of
    from chorale.kernels.triton.dense.skinny_ptx import MOST_SHARED
    from chorale.kernels.triton.tuning import SkinnyConfig

    tile = SkinnyConfig(*shape)
    for dim, depth, is_compact in (
        (0, 512, False), (0, 608, False), (64, 512, False), (32, 608, False),
        (0, 512, True), (64, 576, True),
    ):  # fmt: skip
        p = product_of(tile, tokens, depth, dim, True, is_compact=is_compact)
        if p.units * p.columns <= p.warps and p.ring <= MOST_SHARED:
            check(p, tokens, first=6 if dim else 2, rows=256)
