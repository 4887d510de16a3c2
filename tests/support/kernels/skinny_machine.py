"""All warps of one program of ``skinny_ptx`` on a CPU, phase by phase: up to its barrier, and after.

``install`` lets Triton's interpreter run ``skinny_fused``'s kernels that way, on real addresses.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np

from tests.support.kernels.ptx_machine import LANES, WORD, Lanes, Warp, bfloat16_pair

BARRIER = "bar.sync 0"
SIZES = {"16": 2, "32": 4, "64": 8}


def bits(values: Lanes) -> Lanes:
    return np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)


def to_bfloat16(values: Lanes) -> Lanes:
    """float32 -> the nearest bfloat16's 16 bits, ties to even."""
    word = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return (word + np.uint64(0x7FFF) + (word >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)


class SlimWarp(Warp):
    """What ``skinny_ptx`` needs besides; results are registers like others."""

    def __init__(self, memory: bytes, operands: dict[str, Lanes], warp: int, block: list[SlimWarp]) -> None:
        super().__init__(memory, operands, 0, warp)
        self.block = block
        block.append(self)

    def part(self, lines: list[str]) -> None:
        for each in lines:
            guard, line = self.guard(each)
            self.step(line, guard)

    def step(self, line: str, guard: Lanes) -> None:
        if line.startswith(".shared") and self is not self.block[0]:
            self.shared = self.block[0].shared  # one memory for all
            self.values["skinny_ring"] = self.block[0].values["skinny_ring"]
        elif not line.startswith("bar.warp.sync"):
            super().step(line, guard)

    def number(self, text: str) -> Lanes:
        return (self.get(text) & np.uint64(WORD)).astype(np.uint32).view(np.float32)

    def mov(self, _name: str, operands: list[str], _: Lanes) -> None:
        to, source = operands
        self.values[to] = np.zeros(32, np.uint64) if source == "0f00000000" else self.get(source)

    def add(self, name: str, operands: list[str], guard: Lanes) -> None:
        if name != "add.rn.f32":
            return super().add(name, operands, guard)
        self.values[operands[0]] = bits(self.number(operands[1]) + self.number(operands[2]))
        return None

    def mul(self, name: str, operands: list[str], _: Lanes) -> None:
        to, a, b = operands
        if name == "mul.rn.f32":
            self.values[to] = bits(self.number(a) * self.number(b))
        else:
            self.set(to, self.get(a) * self.get(b))

    def fma(self, name: str, operands: list[str], _: Lanes) -> None:
        assert name == "fma.rn.f32"
        to, a, b, c = operands
        exact = self.number(a).astype(np.float64) * self.number(b) + self.number(c)
        self.values[to] = bits(exact)

    def cvt(self, name: str, operands: list[str], _: Lanes) -> None:
        if name == "cvt.u32.u16":
            self.values[operands[0]] = self.get(operands[1]) & np.uint64(0xFFFF)
            return
        assert name == "cvt.rn.bf16x2.f32"
        to, high, low = operands
        self.values[to] = to_bfloat16(self.number(high)) << np.uint64(16) | to_bfloat16(self.number(low))

    def shr(self, _name: str, operands: list[str], _: Lanes) -> None:
        self.values[operands[0]] = self.get(operands[1]) >> self.get(operands[2])

    def rem(self, _name: str, operands: list[str], _: Lanes) -> None:
        self.values[operands[0]] = self.get(operands[1]) % self.get(operands[2])

    def div(self, _name: str, operands: list[str], _: Lanes) -> None:
        self.values[operands[0]] = self.get(operands[1]) // self.get(operands[2])

    def setp(self, name: str, operands: list[str], guard: Lanes) -> None:
        assert name == "setp.lt.s32"
        to, a, b = operands
        self.values[to] = (self.signed(a) < self.signed(b)).astype(np.uint64)

    def shfl(self, _name: str, operands: list[str], _: Lanes) -> None:
        self.values[operands[0]] = self.get(operands[1])[LANES ^ int(operands[2])]

    def cp(self, name: str, operands: list[str], guard: Lanes) -> None:
        if len(operands) < 4:
            return super().cp(name, operands, guard)
        real = self.get(operands[3]) == 16
        super().cp(name, operands[:3], real)
        for lane in LANES[~real]:
            self.waiting[-1].append((int(self.place(operands[0])[lane]), np.zeros(16, np.uint8)))
        return None

    def ld(self, name: str, operands: list[str], guard: Lanes) -> None:
        if "v4" in name:
            return self.vector(name, operands, guard)
        size = SIZES[name.rsplit(".b", 1)[1]]
        shared = ".shared" in name
        places = self.place(operands[1]) - (0 if shared else self.BASE)
        found = self.bytes_at(self.shared if shared else self.memory, places, size, guard)
        self.values[operands[0]] = found.view(f"u{size}")[:, 0].astype(np.uint64)
        return None

    def vector(self, name: str, operands: list[str], guard: Lanes) -> None:
        before = {register: self.values.get(register) for register in operands[:4]}
        super().ld(name, operands, guard)
        for register, old in before.items():
            if not guard.all():
                assert old is not None
                self.values[register] = np.where(guard, self.values[register], old)

    def st(self, name: str, operands: list[str], guard: Lanes) -> None:
        to, *words = operands
        places = self.place(to)
        assert not (places % (4 * len(words))).any(), "misaligned"
        for n, word in enumerate(words):
            for lane in LANES:
                at = places[lane] + 4 * n
                self.shared[at : at + 4] = np.frombuffer(np.uint32(self.get(word)[lane]).tobytes(), np.uint8)

    def mma(self, name: str, operands: list[str], _: Lanes) -> None:
        assert operands[:4] == operands[10:]
        g, t = LANES // 4, LANES % 4
        left, right = np.zeros((16, 16)), np.zeros((16, 8))
        for half in (0, 1):
            for part in range(4):
                pair = bfloat16_pair(self.get(operands[4 + part]))
                left[g + 8 * (part % 2), 2 * t + 8 * (part // 2) + half] = pair[:, half]
            for part in range(2):
                pair = bfloat16_pair(self.get(operands[8 + part]))
                right[2 * t + 8 * part + half, g] = pair[:, half]
        product = left @ right
        for part in range(4):
            added = product[g + 8 * (part // 2), 2 * t + part % 2]
            self.values[operands[part]] = bits(self.number(operands[part]) + added)


def run_block(
    text: str, memory: bytes, operands: list[dict[str, Lanes]], kind: type[SlimWarp] = SlimWarp
) -> list[SlimWarp]:
    lines = [line.strip() for line in text.strip()[1:-1].split(";") if line.strip()]
    middle = lines.index(BARRIER)
    block: list[SlimWarp] = []
    warps = [kind(memory, each, n, block) for n, each in enumerate(operands)]
    for part in (lines[:middle], lines[middle + 1 :]):
        for warp in warps:
            warp.part(part)
    return warps


class LiveWarp(SlimWarp):
    """Global addresses are this process's."""

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
