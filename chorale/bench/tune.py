"""Finds the fastest shapes of the Triton kernels on the GPU that is here: ``chorale bench tune``.

Each shape is put into the table of shapes (``kernels/triton/table.py``), and the whole op runs by it, as in
the engine: first one layer against the reference op, then several inside a CUDA graph. A shape that does not
compile, or whose result is wrong, is left out and reported. What is not reached in time keeps its shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chorale.bench.gpu_time import graph_seconds
from chorale.bench.kernels import Bench, Works
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.kernels.triton import table, tuning
from chorale.kernels.triton.launch import is_hopper, is_nvidia, tuning_of
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.kernels.triton.table_file import OF_STEPS, Choice, table_of
from chorale.kernels.triton.tuning import GemvConfig, PrefillTile, SkinnyConfig, Tile

WORST = 0.02  # relative error against the reference; of a right result in bfloat16 it is a tenth of this
GAIN = 0.98  # of the present shape's time: what is no faster than that is noise
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tunable:
    """One entry of the table. ``case``: of ``Bench``; ``tokens``: the sizes at which it is measured."""

    name: str
    case: str
    tokens: tuple[int, ...]
    shapes: tuple[Any, ...]


# fmt: off
_GEMV = tuple(
    GemvConfig(tiles, columns, warps, group, groups, 1)
    for tiles, columns in ((1, 1), (1, 2), (2, 1), (2, 2))
    for warps in (2, 4)
    for group, groups in ((3, 2), (9, 1))
)
_GEMV_DOWN = (
    *_GEMV, GemvConfig(1, 1, 1, 5, 1, 5), GemvConfig(1, 1, 1, 3, 2, 3), GemvConfig(1, 1, 2, 3, 2, 3),
)
_STREAM = (
    SkinnyConfig(5, 8, 1, 2, 2), SkinnyConfig(4, 8, 1, 3, 2), SkinnyConfig(2, 8, 1, 6, 2),
    SkinnyConfig(2, 8, 2, 3, 2), SkinnyConfig(2, 4, 1, 6, 2), SkinnyConfig(2, 16, 1, 3, 2),
    SkinnyConfig(3, 8, 1, 4, 4),
)
_SKINNY = (
    Tile(64, 16, 64, 4, 4), Tile(64, 16, 128, 4, 2), Tile(64, 16, 128, 4, 3), Tile(32, 16, 128, 4, 4),
    Tile(128, 16, 64, 8, 3), Tile(32, 16, 256, 4, 2),
)
_DECODE = (
    Tile(0, 1, 64, 2, 2), Tile(0, 1, 64, 2, 3), Tile(0, 1, 64, 4, 2), Tile(0, 1, 64, 4, 3),
    Tile(0, 1, 128, 2, 2), Tile(0, 1, 128, 4, 2), Tile(0, 1, 32, 2, 3),
)
_PREFILL = (
    PrefillTile(64, 64, True, 4, 2), PrefillTile(64, 64, False, 4, 2), PrefillTile(64, 64, False, 4, 3),
    PrefillTile(64, 128, False, 4, 2), PrefillTile(128, 64, False, 8, 2), PrefillTile(128, 64, True, 8, 2),
)
TUNABLES = (
    Tunable("gemv_gate_up", "experts", (1, 2, 8, 16, 32, 64), _GEMV),
    Tunable("gemv_down", "experts", (1, 2, 8, 16, 32, 64), _GEMV_DOWN),
    Tunable("decode", "full", (8, 64), _DECODE),
    Tunable("decode_few_window", "window", (1, 8), _DECODE),
    Tunable("skinny_qkv", "qkv", (4, 8, 16), _STREAM),
    Tunable("skinny_output", "route", (2, 4, 8), _STREAM),
    Tunable("skinny", "qkv", (12, 16), _SKINNY),
    Tunable("skinny_head", "head", (4, 16), _SKINNY),
    Tunable("prefill", "prompt", (4096,), _PREFILL),
    Tunable("prefill_window", "prompt window", (4096,), _PREFILL),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Settings:
    """``shape``: sizes of the model. ``most_tokens`` bounds the sizes at which shapes are measured."""

    shape: Mapping[str, int]
    device: str
    seconds: float
    context: int = 1024
    layers: int = 4
    vocab: int = 201_088
    most_tokens: int = 4096


def tune(settings: Settings, tunables: Sequence[Tunable], say: Say) -> tuple[list[Choice], list[str]]:
    """Returns the choices, and what was not finished in time. A choice without a shape is ``tuning.py``'s."""
    tuner = _Tuner(settings, say)
    unfinished: list[str] = []
    try:
        with torch.inference_mode():
            for tunable in tunables:
                unfinished += tuner.settle(tunable)
    finally:
        use(())
    return tuner.choices, unfinished


def use(choices: Sequence[Choice]) -> None:
    table.use(table_of(choices))
    tuning_of.cache_clear()


class _Tuner:
    def __init__(self, settings: Settings, say: Say) -> None:
        self._settings, self._say = settings, say
        self._deadline = time.monotonic() + settings.seconds
        self._ours, self._exact = (self._bench(ops) for ops in (TRITON_OPS, REFERENCE_OPS))
        self.choices: list[Choice] = []

    def _bench(self, ops: Any) -> Bench:
        torch.manual_seed(0)  # both have the same first layer
        layers = self._settings.layers if ops is TRITON_OPS else 1
        return Bench(self._settings.shape, layers, ops, self._settings.device, self._settings.vocab)

    def settle(self, tunable: Tunable) -> Iterator[str]:
        """Yields what was not finished."""
        sizes = [size for size in tunable.tokens if size <= self._settings.most_tokens]
        device, experts = torch.device(self._settings.device), self._settings.shape["experts"]
        if tunable.name in OF_STEPS and not is_nvidia(device):
            return  # their kernels are PTX
        if tunable.case == "experts" and is_hopper(device):  # from there on it has kernels of another kind
            most = tuning.grouped_from(experts, fp8=False)
            sizes = [size for size in sizes if size * table.TOP_K <= most * experts]
        for some in [[size] for size in sizes] if tunable.name in OF_STEPS else [sizes]:
            if time.monotonic() >= self._deadline:
                yield f"{tunable.name} at {', '.join(map(str, some))}"
            elif some:
                self._settle(tunable, some)

    def _settle(self, tunable: Tunable, sizes: list[int]) -> None:
        """Finds one entry: the shape with the least mean of times as shares of the present one's."""
        is_step = tunable.name in OF_STEPS
        experts = self._settings.shape["experts"] if tunable.name.startswith("gemv") else 0
        use(self.choices)
        before = [self._seconds(tunable.case, size) for size in sizes]
        blank = Choice(tunable.name, sizes[-1] if is_step else 0, experts, None, 0, sum(before) * 1e6, 0)
        best, share, tried = None, GAIN, 0
        for shape in tunable.shapes:
            if time.monotonic() >= self._deadline:
                break
            use([*self.choices, replace(blank, shape=shape)])
            try:
                for size in sizes:
                    self._check(tunable.case, size)
                found = [self._seconds(tunable.case, size) for size in sizes]
            except Exception as error:  # whatever a compiler may raise; a CUDA error ends all later ones, too
                self._say(
                    f"{blank.name}: {shape} left out: {type(error).__name__}: {str(error).splitlines()[:1]}"
                )
                continue
            tried += 1
            mean = sum(now / then for now, then in zip(found, before, strict=True)) / len(sizes)
            if mean < share:
                best, share = replace(blank, shape=shape, us=sum(found) * 1e6), mean
        what = f"{blank.name} at {', '.join(map(str, sizes))} tokens: {tried} shapes"
        if best is None:
            self._say(f"{what}, the present one stays ({blank.before_us:.1f} us)")
            if is_step:  # or the next size's would be used for this one
                self.choices.append(replace(blank, us=blank.before_us, tried=tried))
            return
        self.choices.append(replace(best, tried=tried))
        self._say(f"{what}, {best.us:.1f} us instead of {best.before_us:.1f}: {best.shape}")

    def _cases(self, bench: Bench, case: str, tokens: int, layers: int | None = None) -> Works:
        torch.manual_seed(tokens)
        if case.startswith("prompt"):
            return bench.prompt_cases(tokens, layers)
        return bench.cases(tokens, self._settings.context, layers)

    def _seconds(self, case: str, tokens: int) -> float:
        """Returns the time of one layer's op."""
        cases = self._cases(self._ours, case, tokens)
        work, count = next((work, count) for name, work, count, _ in cases if name == case)
        if self._settings.device != "cpu":
            return graph_seconds(work) / count
        work()
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) / count

    def _check(self, case: str, tokens: int) -> None:
        """Raises ``ArithmeticError`` if the result differs from the reference's."""
        ours, exact = (self._first(bench, case, tokens) for bench in (self._ours, self._exact))
        error = float((ours - exact).norm() / exact.norm())
        if not error < WORST:
            raise ArithmeticError(f"relative error {error:.3g} at {tokens} tokens")

    def _first(self, bench: Bench, case: str, tokens: int) -> torch.Tensor:
        cases = self._cases(bench, case, tokens, 1)
        found = next(work() for name, work, _, _ in cases if name == case)
        while not isinstance(found, torch.Tensor):
            found = found[0]
        return found.float().flatten()


def facts(device: torch.device) -> dict[str, Any]:
    """Returns what a table's file says about where it was measured."""
    from chorale.kernels.triton.launch import TRITON_VERSION, architecture_of

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    return {
        "architecture": architecture_of(device)[0],
        "gpu": name,
        "torch": torch.__version__,
        "triton": TRITON_VERSION,
    }
