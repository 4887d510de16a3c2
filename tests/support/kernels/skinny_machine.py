"""Runs all warps of a ``skinny_ptx`` program on a CPU, in two phases: before and after its barrier.

``install`` makes Triton's interpreter run the kernels of ``skinny_fused`` with it, on real addresses.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np

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
