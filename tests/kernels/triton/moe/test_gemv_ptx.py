"""The PTX loop of the streaming expert products, run by ``ptx_machine`` in all shapes that tuning can choose.

Not covered: how the loop's operands are made and its results stored (``stream.py``), which needs a GPU.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from chorale.kernels import mxfp4
from chorale.kernels.triton import tuning
from tests.support.kernels.ptx_machine import LANES, Warp

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from chorale.kernels.triton.moe.gemv_ptx import Loop, loop_text
from chorale.kernels.triton.moe.packing import pack

CHUNKS = 45


def tuned() -> list[tuple[tuning.GemvConfig, bool]]:
    """Every shape of gate_up (which does not wait inside) and of down, for 20b's and 120b's experts."""
    found = {
        (choose(tokens, tokens * 4 / experts), choose is tuning.gemv_down)
        for choose in (tuning.gemv_gate_up, tuning.gemv_down)
        for tokens in range(1, tuning.GEMV_TOKENS + 1)
        for experts in (32, 128)
    }
    return sorted(found, key=str)


@pytest.mark.parametrize(("tile", "wait"), tuned(), ids=str)
def test_the_loop_multiplies_decoded_weights(tile: tuning.GemvConfig, wait: bool) -> None:
    groups = CHUNKS // tile.splits // tile.group
    loop = Loop(tile.tiles, tile.columns, tile.num_warps, tile.group, min(tile.groups, groups), wait)
    chunks = groups * tile.group
    check(loop, groups, chunks, skipped=CHUNKS - chunks)


@pytest.mark.parametrize(("group", "groups", "rounds"), [(1, 1, 1), (2, 3, 3), (4, 2, 5), (1, 6, 7)])
def test_other_depths(group: int, groups: int, rounds: int) -> None:
    check(Loop(2, 1, 2, group, groups, True), rounds, group * rounds, skipped=0)


def check(loop: Loop, groups: int, chunks: int, skipped: int) -> None:
    """The last warp of a program; chunks after the first ``skipped``; one input in three missing."""
    torch.manual_seed(loop.group)
    rows, width = 16 * (loop.tiles + 1), 64 * (chunks + skipped)
    blocks, scales = mxfp4.quantize(torch.randn(1, rows, width))
    weights = mxfp4.dequantize(blocks, scales, torch.float32)[0, 16:, 64 * skipped :].double().numpy()
    packed = pack(blocks, scales)
    inputs = torch.randn(8 * loop.columns, width).bfloat16()
    there = np.arange(8 * loop.columns) % 3 != 1
    parts = [packed.blocks.numpy().tobytes(), packed.scales.numpy().tobytes()]
    parts.append(inputs.view(torch.int16).numpy().tobytes())
    starts = Warp.BASE + np.cumsum([0, len(parts[0]), len(parts[1])])
    at = packed.chunks + skipped  # of the second row tile
    first = loop.outputs
    operands = {
        f"${first}": starts[0] + at * 512 + LANES * 16,
        f"${first + 1}": starts[1] + at * 32 + LANES // 4 * 4,
        f"${first + 2}": np.full(32, packed.chunks * 512),
        f"${first + 3}": np.full(32, packed.chunks * 32),
        f"${first + 4}": np.full(32, groups),
    }
    for n in range(loop.columns):
        row = 8 * n + LANES // 4
        # A missing input's address is wrong on purpose: nobody may read there.
        place = np.where(there[row], starts[2] + (row * width + 64 * skipped + LANES % 4 * 16) * 2, 3)
        operands[f"${first + 5 + n}"] = place
        operands[f"${first + 5 + loop.columns + n}"] = there[row].astype(np.int64)
    warp = Warp(b"".join(parts), operands, loop.warps - 1)
    warp.run(loop_text(loop))
    exact = weights @ inputs.double().numpy()[:, 64 * skipped :].T
    for r in range(loop.tiles):
        for n in range(loop.columns):
            for part in range(4):
                row, column = 16 * r + LANES // 4 + 8 * (part // 2), 8 * n + LANES % 4 * 2 + part % 2
                found = warp.number(f"${4 * (r * loop.columns + n) + part}")[there[column]]
                expected = exact[row, column][there[column]]
                assert np.abs(found - expected).max() < 1e-5 * np.abs(exact).max()
