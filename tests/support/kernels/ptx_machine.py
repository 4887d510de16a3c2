"""A warp that runs the PTX of ``gemv_ptx`` or ``skinny_ptx`` on a CPU, under the worst allowed timing.

Copies into shared memory arrive only at a ``wait_group``, memory starts as NaN, and addresses are checked.
Only the instructions that the two modules use are implemented.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

LANES = np.arange(32)
WORD = 0xFFFFFFFF
Lanes = np.ndarray[Any, Any]
BINARY: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "add": np.add, "mul": np.multiply, "div": np.floor_divide, "rem": np.remainder, "and": np.bitwise_and,
    "shl": np.left_shift, "shr": np.right_shift,
}  # fmt: skip


def bfloat16_pair(word: Lanes) -> Lanes:
    """[32] uint64 -> [32, 2] float64"""
    halves = np.stack((word << np.uint64(16), word & np.uint64(0xFFFF0000)), 1) & np.uint64(WORD)
    return halves.astype(np.uint32).view(np.float32).astype(np.float64)


def from_pair(values: Lanes) -> Lanes:
    """Returns the inverse of ``bfloat16_pair``; the values must be exact in bfloat16."""
    bits = values.astype(np.float32).view(np.uint32)
    real = ~np.isnan(values)
    assert not (bits & 0xFFFF)[real].any(), "a product of a weight and its scale is not exact"
    return (bits[:, 0] >> 16 | bits[:, 1] & np.uint32(0xFFFF0000)).astype(np.uint64)


def bits(values: Lanes) -> Lanes:
    return np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)


def to_bfloat16(values: Lanes) -> Lanes:
    """Returns the 16 bits of the nearest bfloat16 of each float32, ties to even."""
    word = bits(values)
    return (word + np.uint64(0x7FFF) + (word >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)


class Warp:
    """Global memory is one array of bytes at address 2^32; operands are [32] integers.

    ``block``: the warps of its program, which share memory; the new warp is added to it.
    """

    BASE = 1 << 32

    def __init__(
        self, memory: bytes, operands: dict[str, Lanes], warp: int, block: list[Any] | None = None
    ) -> None:
        self.memory = np.frombuffer(memory, np.uint8)
        self.values: dict[str, Lanes] = {k: v.astype(np.int64).view(np.uint64) for k, v in operands.items()}
        self.values["%tid.x"] = (LANES + 32 * warp).astype(np.uint64)
        self.shared = np.zeros(0, np.uint8)
        self.waiting: list[list[tuple[int, Lanes]]] = [[]]
        self.block: list[Any] = [] if block is None else block
        self.block.append(self)

    def run(self, text: str) -> None:
        body = text.strip()[1:-1].replace("AGAIN:", "AGAIN: ;")
        lines = [line.strip() for line in body.split(";") if line.strip()]
        at = 0
        while at < len(lines):
            guard, line = self.guard(lines[at])
            if re.fullmatch(r"bra \w+", line):
                assert guard.all() or not guard.any(), "a branch within a warp"
                at = lines.index(f"{line.split()[1]}:") if guard.all() else at + 1
                continue
            self.step(line, guard)
            at += 1

    def part(self, lines: list[str]) -> None:
        """Runs lines without a branch."""
        for each in lines:
            guard, line = self.guard(each)
            self.step(line, guard)

    def guard(self, line: str) -> tuple[Lanes, str]:
        found = re.match(r"@(!?)(\w+) (.*)", line, re.S)
        if found is None:
            return np.ones(32, bool), line
        held = self.values[found[2]].astype(bool)
        return ~held if found[1] else held, found[3]

    def step(self, line: str, guard: Lanes) -> None:
        if line.startswith((".reg", "griddepcontrol", "bar.warp.sync")) or line.endswith(":"):
            return
        if line.startswith(".shared"):
            name, size = re.search(r"(\w+)\[(\d+)\]", line).groups()  # type: ignore[union-attr]
            first = self.block[0]
            if self is first:
                self.values[name] = np.full(32, len(self.shared), np.uint64)
                self.shared = np.concatenate((self.shared, np.full(int(size), 0xFF, np.uint8)))
            else:  # the lanes share one memory
                self.shared, self.values[name] = first.shared, first.values[name]
            return
        with np.errstate(all="ignore"):  # overflow in a wrong loop
            self.instruction(line, guard)

    def instruction(self, line: str, guard: Lanes) -> None:
        name, _, rest = line.partition(" ")
        if name == "mov.b32" and "{" in rest:
            self.move_halves(rest)
            return
        operands = [part.strip(" {}") for part in re.split(r",", rest)] if rest else []
        kind = name.split(".")[0]
        if kind in BINARY:
            self.binary(name, operands, BINARY[kind])
        else:
            handler: Callable[..., None] = getattr(self, kind)
            handler(name, operands, guard)

    # ---- registers

    def get(self, text: str) -> Lanes:
        if text in self.values:
            return self.values[text]
        return np.full(32, int(text, 0) & (2**64 - 1), np.uint64)

    def set(self, name: str, value: Lanes, width: str = "32") -> None:
        self.values[name] = value & np.uint64(WORD) if width == "32" else value

    def signed(self, text: str) -> Lanes:
        return (self.get(text) & np.uint64(WORD)).astype(np.uint32).view(np.int32).astype(np.int64)

    def number(self, text: str) -> Lanes:
        """Returns a register as float32."""
        return (self.get(text) & np.uint64(WORD)).astype(np.uint32).view(np.float32)

    def mov(self, name: str, operands: list[str], _: Lanes) -> None:
        is_zero = operands[1] == "0f00000000"
        self.set(operands[0], np.zeros(32, np.uint64) if is_zero else self.get(operands[1]), name[-2:])

    def binary(self, name: str, operands: list[str], operate: Callable[[Lanes, Lanes], Lanes]) -> None:
        to, a, b = operands
        if name.endswith(".f32"):
            self.values[to] = bits(operate(self.number(a), self.number(b)))
        else:
            self.set(to, operate(self.get(a), self.get(b)), name[-2:])

    def move_halves(self, rest: str) -> None:
        """``{low, high}, word`` or ``word, {low, high}``."""
        names = re.findall(r"\w+", rest)
        if rest.lstrip().startswith("{"):
            word = self.get(names[2])
            self.values[names[0]], self.values[names[1]] = word & np.uint64(0xFFFF), word >> np.uint64(16)
        else:
            self.set(names[0], self.get(names[2]) << np.uint64(16) | self.get(names[1]))

    def mad(self, name: str, operands: list[str], _: Lanes) -> None:
        to, a, b, c = operands
        product = self.signed(a) * self.signed(b)
        wide = name == "mad.wide.s32"
        self.set(to, product.view(np.uint64) + self.get(c), "64" if wide else "32")

    def shf(self, name: str, operands: list[str], _: Lanes) -> None:
        to, low, high, by = operands
        both = self.get(high) << np.uint64(32) | self.get(low)
        right = name.startswith("shf.r")
        self.set(to, both >> self.get(by) if right else (both << self.get(by)) >> np.uint64(32))

    def lop3(self, _name: str, operands: list[str], _: Lanes) -> None:
        to, *inputs, table = operands
        a, b, c = (self.get(each) for each in inputs)
        value = np.zeros(32, np.uint64)
        for row in range(8):
            if int(table, 0) >> row & 1:
                terms = (x if row >> n & 1 else ~x for n, x in ((2, a), (1, b), (0, c)))
                value |= np.bitwise_and.reduce(list(terms))
        self.set(to, value)

    def prmt(self, _name: str, operands: list[str], _: Lanes) -> None:
        to, a, b, pick = operands
        both = self.get(b) << np.uint64(32) | self.get(a)
        value = np.zeros(32, np.uint64)
        for byte in range(4):
            place = self.get(pick) >> np.uint64(4 * byte) & np.uint64(7)
            value |= (both >> place * np.uint64(8) & np.uint64(255)) << np.uint64(8 * byte)
        self.set(to, value)

    def setp(self, name: str, operands: list[str], _: Lanes) -> None:
        to, a, b = operands
        compare = {"gt": np.greater, "lt": np.less, "eq": np.equal, "ne": np.not_equal}[name.split(".")[1]]
        self.values[to] = compare(self.signed(a), self.signed(b)).astype(np.uint64)

    def selp(self, _name: str, operands: list[str], _: Lanes) -> None:
        to, a, b, which = operands
        self.set(to, np.where(self.get(which).astype(bool), self.get(a), self.get(b)))

    def shfl(self, _name: str, operands: list[str], _: Lanes) -> None:
        self.values[operands[0]] = self.get(operands[1])[LANES ^ int(operands[2])]

    def cvt(self, name: str, operands: list[str], _: Lanes) -> None:
        if name == "cvt.u32.u16":
            self.values[operands[0]] = self.get(operands[1]) & np.uint64(0xFFFF)
            return
        assert name == "cvt.rn.bf16x2.f32"
        to, high, low = operands
        self.values[to] = to_bfloat16(self.number(high)) << np.uint64(16) | to_bfloat16(self.number(low))

    # ---- memory

    def place(self, text: str) -> Lanes:
        register, _, offset = text.strip("[]").partition("+")
        return (self.get(register.strip()) + np.uint64(int(offset or 0))).astype(np.int64)

    def bytes_at(self, memory: Lanes, places: Lanes, size: int, guard: Lanes) -> Lanes:
        """Returns [32, size] uint8; NaN where the guard is off."""
        index = places[:, None] + np.arange(size)
        assert not (places[guard] % size).any(), "misaligned"
        assert ((index[guard] >= 0) & (index[guard] < len(memory))).all(), "out of bounds"
        found = np.full((32, size), 0xFF, np.uint8)
        found[guard] = memory[index[guard]]
        return found

    def cp(self, name: str, operands: list[str], guard: Lanes) -> None:
        if name == "cp.async.commit_group":
            self.waiting.append([])
        elif name == "cp.async.wait_group":
            done = len(self.waiting) - 1 - int(operands[0])
            for to, data in (each for group in self.waiting[: max(0, done)] for each in group):
                self.shared[to : to + len(data)] = data
            self.waiting = self.waiting[max(0, done) :]
        else:
            size, to = int(operands[2]), self.place(operands[0])
            real = self.get(operands[3]) == size if len(operands) > 3 else guard
            data = self.bytes_at(self.memory, self.place(operands[1]) - self.BASE, size, real)
            self.bytes_at(self.shared, to, size, real)
            if len(operands) > 3:  # bytes beyond the source are filled with zeros
                data[~real] = 0
            for lane in LANES if len(operands) > 3 else LANES[guard]:
                self.waiting[-1].append((int(to[lane]), data[lane]))

    def ld(self, name: str, operands: list[str], guard: Lanes) -> None:
        """Lanes whose guard is off keep the old values of their registers."""
        *to, source = operands
        size, is_shared = int(name.rpartition(".")[2][1:]) // 8, ".shared" in name
        places = self.place(source) - (0 if is_shared else self.BASE)
        found = self.bytes_at(self.shared if is_shared else self.memory, places, size * len(to), guard)
        for register, word in zip(to, found.view(f"u{size}").T, strict=True):
            loaded = word.astype(np.uint64)
            self.values[register] = np.where(guard, loaded, self.values.get(register, loaded))

    def st(self, _name: str, operands: list[str], _: Lanes) -> None:
        to, *words = operands
        places = self.place(to)
        assert not (places % (4 * len(words))).any(), "misaligned"
        for n, word in enumerate(words):
            for lane in LANES:
                at = places[lane] + 4 * n
                self.shared[at : at + 4] = np.frombuffer(np.uint32(self.get(word)[lane]).tobytes(), np.uint8)

    # ---- arithmetic

    def fma(self, name: str, operands: list[str], _: Lanes) -> None:
        to, a, b, c = operands
        if name == "fma.rn.f32":
            self.values[to] = bits(self.number(a).astype(np.float64) * self.number(b) + self.number(c))
            return
        assert name == "fma.rn.bf16x2"
        x, y, z = (bfloat16_pair(self.get(each)) for each in (a, b, c))
        self.set(to, from_pair(x * y + z))

    def mma(self, name: str, operands: list[str], _: Lanes) -> None:
        assert name == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        to, a, b = operands[:4], operands[4:8], operands[8:10]
        assert to == operands[10:]
        g, t = LANES // 4, LANES % 4
        left, right = np.zeros((16, 16)), np.zeros((16, 8))
        for half in (0, 1):
            for part in range(4):
                pair = bfloat16_pair(self.get(a[part]))
                left[g + 8 * (part % 2), 2 * t + 8 * (part // 2) + half] = pair[:, half]
            for part in range(2):
                right[2 * t + 8 * part + half, g] = bfloat16_pair(self.get(b[part]))[:, half]
        product = left @ right
        for part in range(4):
            added = product[g + 8 * (part // 2), 2 * t + part % 2]
            self.values[to[part]] = bits(self.number(to[part]) + added)
