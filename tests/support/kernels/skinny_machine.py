"""Runs all warps of a ``skinny_ptx`` program on a CPU, in two phases: before and after its barrier.

``install`` makes Triton's interpreter run the kernels of ``skinny_fused`` with it, on real addresses.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import torch

from tests.support.kernels.ptx_machine import LANES, Lanes, Warp

BARRIER = "bar.sync 0"


def run_block(
    text: str, memory: bytes, operands: list[dict[str, Lanes]], kind: type[Warp] = Warp
) -> list[Warp]:
    lines = [line.strip() for line in text.strip()[1:-1].split(";") if line.strip()]
    middle = lines.index(BARRIER)
    block: list[Warp] = []
    warps = [kind(memory, each, n, block) for n, each in enumerate(operands)]
    for part in (lines[:middle], lines[middle + 1 :]):
        for warp in warps:
            warp.part(part)
    return warps


class LiveWarp(Warp):
    """A warp whose global addresses are addresses of this process."""

    BASE = 0

    def bytes_at(self, memory: Lanes, places: Lanes, size: int, guard: Lanes) -> Lanes:
        if memory is not self.memory:
            return super().bytes_at(memory, places, size, guard)
        assert not (places[guard] % size).any(), "misaligned"
        found = np.full((32, size), 0xFF, np.uint8)
        for lane in LANES[guard]:
            found[lane] = np.frombuffer(ctypes.string_at(int(places[lane]), size), np.uint8)
        return found


class _Results:
    def __init__(self, results: list[Any]) -> None:
        self.get_result = results.__getitem__


def _inline_asm(
    _: Any, text: str, constraints: str, handles: Any, types: Any, _pure: bool, _pack: int
) -> Any:
    from triton.runtime.interpreter import TensorHandle

    outputs = re.findall(r"=&(\w)", constraints)
    warps = len(handles[0].data) // 32
    operands = [
        {f"${len(outputs) + n}": handle.data[32 * w : 32 * w + 32] for n, handle in enumerate(handles)}
        for w in range(warps)
    ]
    block = run_block(text, b"", operands, LiveWarp)
    results = []
    for n, kind in enumerate(outputs):
        words = np.concatenate([warp.get(f"${n}") for warp in block])
        values = words.view(np.int64) if kind == "l" else words.astype(np.uint32).view(np.float32)
        results.append(TensorHandle(values, types[n].scalar if hasattr(types[n], "scalar") else types[n]))
    return _Results(results)


def install() -> None:
    from triton.runtime import interpreter

    interpreter.InterpreterBuilder.create_inline_asm = _inline_asm


def unpack_rows(rows: Any) -> torch.Tensor:
    """The inverse of ``compact.pack_rows``, [N, K] float32."""
    from chorale.kernels.triton.dense.compact import ALL, COLUMNS, SCALE, TURNED, TURNS, signed

    units, chunks, _ = rows.words.shape
    firsts, ends = rows.words[..., :128], rows.words[..., 128:]
    lanes = torch.cat((firsts.unflatten(-1, (4, 2, 4, 4)), ends.unflatten(-1, (4, 2, 4, 2))), -1)
    words = lanes.unflatten(-1, (2, 3))  # [unit, chunk, i, half, t, part, 3]
    fourth = torch.zeros_like(words[..., 0])
    for k, (turn, mask) in enumerate(zip(TURNS, TURNED, strict=True)):
        turned = words[..., k] >> turn & (1 << 32 - turn) - 1 | words[..., k] << 32 - turn
        fourth |= turned & signed(mask)
    pairs = torch.cat((words & signed(ALL), fourth.unsqueeze(-1)), -1)
    bits = torch.stack((pairs << 16, pairs & signed(0xFFFF0000)), -1)  # of float32
    values = bits.view(torch.float32).unflatten(0, (-1, 8)).permute(0, 4, 1, 3, 2, 6, 5, 7, 8)
    whole: torch.Tensor = values.reshape(8 * units, chunks * COLUMNS)
    return whole * SCALE * rows.scales[:, None]
