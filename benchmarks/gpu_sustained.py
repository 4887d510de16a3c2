"""Expert layers on one GPU for as long as it takes to meet its power limit, with uneven routing.

    python benchmarks/gpu_sustained.py large 128 256 [--e4m3] [--tiles "16,8,4,80,3,0,0,4,3" ...]
    python benchmarks/gpu_sustained.py stream 128 8 [--up "1,1,4,9,1,1" ...] [--down "2,1,2,3,3,1" ...]
    python benchmarks/gpu_sustained.py sums
    python benchmarks/gpu_sustained.py power 128 8192 [--e4m3]

``large``, ``stream``: experts and tokens; without shapes, the one that ``tuning`` chooses (fields of
``GroupedTile`` and of ``GemvConfig``, in their order). All shapes are timed in one order, then in the other,
because the one before leaves the chip warm; ``err``: the result against the first shape's. ``sums``: the
kernels that end a layer, by warps, at 8,192 tokens. ``power``: ``large`` with zeros among its inputs, or for
weights: what changing bits cost. An expert's popularity is lognormal, 0.41 standard deviation / mean, as in
the benchmark's checkpoint. A time is that of many replays of a graph of several layers, whose weights the L2
cannot hold; beside it clock and power, if ``pynvml`` can be imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_moe_large import H, random_experts, say

from chorale.bench.gpu_time import captured, event_seconds
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.norm import Norm, add_norm
from chorale.kernels.triton.moe import gemv, grouped
from chorale.kernels.triton.moe.combine import combine
from chorale.kernels.triton.moe.packing import Experts

GPU = torch.device("cuda")
UNEVEN = math.sqrt(math.log(1 + 0.41**2))
Work = Callable[[], Any]


@dataclasses.dataclass(slots=True)
class Case:
    """Some layers and their inputs, the same for every shape."""

    layers: list[Experts]
    ids: list[torch.Tensor]
    normed: torch.Tensor
    gates: torch.Tensor
    norm: Norm

    def add(self, layer: Callable[..., Any], x: torch.Tensor, count: int) -> None:
        for experts, ids in list(zip(self.layers, self.ids, strict=True))[:count]:
            layer(self.normed, ids, self.gates, experts, x, self.norm)


def make_case(experts: int, tokens: int, *, fp8: bool = False, biases: bool = True) -> Case:
    count = 3 if experts * tokens > 128 * 16 else 8
    generator = torch.Generator(device=GPU).manual_seed(5)
    layers = [random_experts(experts, fp8) for _ in range(count)]
    if not biases:
        layers = [
            dataclasses.replace(e, gate_up_bias=e.gate_up_bias * 0, down_bias=e.down_bias * 0) for e in layers
        ]
    return Case(
        layers,
        [uneven(tokens, experts, generator) for _ in range(count)],
        torch.randn(tokens, H, device=GPU, generator=generator).to(torch.bfloat16),
        torch.softmax(torch.randn(tokens, 4, device=GPU, generator=generator), -1),
        Norm(torch.ones(H, device=GPU), 1e-5, torch.bfloat16),
    )


def uneven(tokens: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    """[T, 4] int64: draws without replacement from experts of uneven popularity."""
    popular = torch.randn(experts, device=GPU, generator=generator) * UNEVEN
    noise = -torch.log(-torch.log(torch.rand(tokens, experts, device=GPU, generator=generator)))
    return (popular + noise).topk(4, dim=1).indices


def sustained(work: Work, warm: float, seconds: float) -> tuple[float, str]:
    """(Microseconds of a replay, clock and power near its end); ``warm`` seconds do not count."""
    graph, state = captured(work), ""
    once = event_seconds(graph.replay, 1)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for span in (warm, seconds):
        count = max(2, int(span / once))
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        time.sleep(0.7 * span)
        state = chip_state()
        end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count, state


def chip_state() -> str:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ""
    nvml.nvmlInit()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    handle = nvml.nvmlDeviceGetHandleByIndex(int(first))
    return f"{nvml.nvmlDeviceGetClockInfo(handle, 1)} MHz {nvml.nvmlDeviceGetPowerUsage(handle) // 1000} W"


def shapes_of(texts: Sequence[str], kind: type[Any]) -> list[Any]:
    return [kind(*(int(number) for number in text.split(","))) for text in texts]


def time_shapes(
    case: Case, shapes: Sequence[Any], layer: Callable[..., Any], use: Callable[[Any], None]
) -> None:
    """Both ways through ``shapes``; ``use`` makes tuning choose one."""
    first: torch.Tensor | None = None
    for shape in (*shapes, *reversed(shapes)):
        use(shape)
        x = torch.zeros(case.normed.shape[0], H, device=GPU)
        case.add(layer, x, 1)
        first = x.clone() if first is None else first
        error = float((x - first).norm() / first.norm())
        us, state = sustained(lambda x=x: case.add(layer, x, len(case.layers)), 0.3, 0.9)
        say(f"{shape}: {us / len(case.layers):.1f} us, err {error:.1e}, {state}")


def time_large(experts: int, tokens: int, fp8: bool, texts: Sequence[str]) -> None:
    chosen = tuning.grouped(tokens * 4 / experts, experts, fp8=fp8)

    def use(tile: tuning.GroupedTile) -> None:
        tuning.grouped = lambda *_, fp8=False: tile

    shapes = shapes_of(texts, tuning.GroupedTile) or [chosen]
    time_shapes(make_case(experts, tokens, fp8=fp8), shapes, grouped.grouped_moe, use)


def time_stream(experts: int, tokens: int, ups: Sequence[str], downs: Sequence[str]) -> None:
    each = tokens * 4 / experts
    up, down = tuning.gemv_gate_up(tokens, each), tuning.gemv_down(tokens, each)
    pairs = [(other, down) for other in shapes_of(ups, tuning.GemvConfig)]
    pairs += [(up, other) for other in shapes_of(downs, tuning.GemvConfig)]

    def use(pair: tuple[tuning.GemvConfig, tuning.GemvConfig]) -> None:
        tuning.gemv_gate_up = lambda *_: pair[0]
        tuning.gemv_down = lambda *_: pair[1]

    time_shapes(make_case(experts, tokens), [(up, down), *pairs], gemv.gemv_moe, use)


def time_sums(tokens: int = 8192) -> None:
    x = torch.randn(tokens, H, device=GPU)
    parts = torch.randn(tokens * 4, H, device=GPU).to(torch.bfloat16)
    place = torch.randperm(tokens * 4, device=GPU).int()
    gates = torch.full((tokens, 4), 0.25, device=GPU)
    norm = Norm(torch.ones(H, device=GPU), 1e-5, torch.bfloat16)
    us, state = sustained(lambda: [combine(parts, place, gates, x, norm) for _ in range(8)], 0.3, 0.9)
    say(f"sum of the experts with the next norm: {us / 8:.1f} us, {state}")
    product = parts[:tokens].unsqueeze(0)
    for warps in (4, 8, 16):
        tuning.ADD_NORM_WARPS = warps
        us, state = sustained(
            lambda: [add_norm(x, product, None, norm.weight, 1e-5, torch.bfloat16) for _ in range(8)],
            0.3,
            0.9,
        )
        say(f"addition and norm, {warps} warps: {us / 8:.1f} us, {state}")


def time_power(experts: int, tokens: int, fp8: bool) -> None:
    case = make_case(experts, tokens, fp8=fp8, biases=False)
    normed, x = case.normed, torch.zeros(tokens, H, device=GPU)

    def show(name: str) -> None:
        us, state = sustained(lambda: case.add(grouped.grouped_moe, x, len(case.layers)), 0.3, 0.9)
        say(f"{name}: {us / len(case.layers):.1f} us, {state}")

    show("random inputs and weights")
    order = torch.randperm(tokens, device=GPU)
    for share in (0.25, 0.5, 1.0):
        case.normed = normed.clone()
        case.normed[order[: int(share * tokens)]] = 0
        show(f"{share:.0%} of the input rows zero")
    case.normed = normed
    for layer in case.layers:
        layer.gate_up.blocks.zero_()
        layer.down.blocks.zero_()
    show("weights zero")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("large", "stream", "sums", "power"))
    parser.add_argument("experts", type=int, nargs="?", default=128)
    parser.add_argument("tokens", type=int, nargs="?", default=256)
    parser.add_argument("--e4m3", action="store_true")
    parser.add_argument("--tiles", nargs="+", default=[])
    parser.add_argument("--up", nargs="+", default=[])
    parser.add_argument("--down", nargs="+", default=[])
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.what == "large":
        time_large(given.experts, given.tokens, given.e4m3, given.tiles)
    elif given.what == "stream":
        time_stream(given.experts, given.tokens, given.up, given.down)
    elif given.what == "power":
        time_power(given.experts, given.tokens, given.e4m3)
    else:
        time_sums()


if __name__ == "__main__":
    main()
