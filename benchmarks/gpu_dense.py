"""Dense products of 2 to 16 tokens on one Hopper GPU: shapes of the split products, and of the others.

    python benchmarks/gpu_dense.py [--tokens 2 4 8 16] [--json FILE]
    TRITON_INTERPRET=1 python benchmarks/gpu_dense.py --dry      (a CPU, small sizes: errors, no times)

A variant's time is that of a CUDA graph of all layers' [QKV, stand-in for attention, stand-in for experts]
(or, for the output projection, [stand-in, output, stand-in]) with programmatic dependent launch as in a step,
less that of the stand-ins alone: what the op adds to a step. Weights are rotated, so the L2 holds none.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from dense_candidates import attend, damp, early_parts

from chorale.bench.gpu_time import graph_seconds
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense import skinny, skinny_fused
from chorale.kernels.triton.dense.qkv import _rotate_kernel
from chorale.kernels.triton.launch import dependent

EPS = 1e-5
RESULTS: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True)
class Sizes:
    hidden: int
    num_q: int
    num_kv: int
    dim: int
    page: int

    @property
    def rows(self) -> int:
        return (self.num_q + 2 * self.num_kv) * self.dim

    @property
    def attended(self) -> int:
        return self.num_q * self.dim

    @property
    def constants(self) -> dict[str, int]:
        return {"NUM_Q": self.num_q, "NUM_KV": self.num_kv, "D": self.dim, "KV_BLOCK": self.page}


REAL = Sizes(2880, 64, 8, 64, 64)
SMALL = Sizes(192, 8, 1, 32, 16)


@dataclass
class Layer:
    norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor


class Case:
    """Inputs of some tokens, and where results go."""

    def __init__(self, sizes: Sizes, tokens: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.sizes = sizes
        self.x = torch.randn(tokens, sizes.hidden, device=device)
        self.rope = torch.randn(tokens, sizes.dim, device=device)
        self.slots = torch.randperm(4 * sizes.page, device=device)[:tokens]
        self.q = torch.zeros(tokens, sizes.num_q, sizes.dim, dtype=dtype, device=device)
        self.attended = torch.randn(tokens, sizes.attended, device=device).to(dtype)
        self.kv = torch.zeros(4, 2, sizes.num_kv, sizes.page, sizes.dim, dtype=dtype, device=device)


def as_float32(layer: Layer) -> Layer:
    return Layer(*(getattr(layer, name).float() for name in ("norm", "qkv", "qkv_bias", "out", "out_bias")))


def make_layer(sizes: Sizes, device: str) -> Layer:
    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * scale).bfloat16()

    return Layer(
        1 + 0.1 * torch.randn(sizes.hidden, device=device),
        randn(sizes.rows, sizes.hidden, scale=sizes.hidden**-0.5),
        randn(sizes.rows),
        randn(sizes.hidden, sizes.attended, scale=0.02),
        randn(sizes.hidden, scale=0.1),
    )


Op = Callable[[Case, Layer], None]

# ------------------------------------------------------------------ variants


def splits_for(tile: tuning.Tile, rows: int, depth: int, programs: int) -> int:
    arch = replace(tuning.H200, multiprocessors=programs // 2)
    return arch.skinny_splits(triton.cdiv(rows, tile.rows), triton.cdiv(depth, tile.depth))


def rotate(case: Case, layer: Layer, parts: torch.Tensor, heads: int, warps: int) -> None:
    sizes, tokens = case.sizes, case.x.shape[0]
    _rotate_kernel[(tokens, triton.cdiv(sizes.num_q + 2 * sizes.num_kv, heads))](
        parts, case.x, layer.qkv_bias, EPS, case.rope, case.slots, case.q, case.kv, **sizes.constants,
        HEADS=heads, H=sizes.hidden, SPLITS=parts.shape[0], BLOCK=triton.next_power_of_2(sizes.hidden),
        num_warps=warps, **dependent(case.x),
    )  # fmt: skip


def add(some: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, block: int, warps: int) -> None:
    splits, tokens, rows = some.shape
    skinny._add_kernel[(tokens, triton.cdiv(rows, block))](
        some, bias, residual, tokens, rows,
        HAS_BIAS=True, SPLITS=splits, BLOCK=block, num_warps=warps, **dependent(residual),
    )  # fmt: skip


def split_qkv(
    shape: tuple[int, int, int, int], programs: int, heads: int, warps: int, case: Case, layer: Layer
) -> None:
    tile = tuning.Tile(shape[0], 16, *shape[1:])
    splits = splits_for(tile, *layer.qkv.shape, programs)
    rotate(case, layer, skinny._parts(case.x, layer.qkv, layer.norm, tile, splits), heads, warps)


def split_out(
    shape: tuple[int, int, int, int], programs: int, block: int, warps: int, case: Case, layer: Layer
) -> None:
    tile = tuning.Tile(shape[0], 16, *shape[1:])
    splits = splits_for(tile, *layer.out.shape, programs)
    add(skinny._parts(case.attended, layer.out, None, tile, splits), layer.out_bias, case.x, block, warps)


def early_qkv(shape: tuple[int, int, int], case: Case, layer: Layer) -> None:
    rotate(case, layer, early_parts(case.x, layer.qkv, layer.norm, *shape), 4, 4)


def early_out(shape: tuple[int, int, int], case: Case, layer: Layer) -> None:
    add(early_parts(case.attended, layer.out, None, *shape), layer.out_bias, case.x, 128, 1)


def stream_qkv(tile: tuning.SkinnyConfig, case: Case, layer: Layer) -> None:
    skinny_fused.qkv(
        case.x, layer.norm, layer.qkv, layer.qkv_bias, EPS, case.rope, case.slots, case.q, case.kv,
        case.sizes.constants, tile,
    )  # fmt: skip


def stream_out(tile: tuning.SkinnyConfig, case: Case, layer: Layer) -> None:
    skinny_fused.project(case.attended, layer.out, layer.out_bias, case.x, tile)


# rows, depth, warps, stages; programs
SPLIT = [
    ((64, 128, 4, 3), 264),  # what tuning has
    ((64, 64, 4, 3), 264),
    ((64, 64, 4, 2), 264),
    ((64, 64, 4, 4), 264),
    ((64, 64, 4, 3), 396),
    ((64, 64, 8, 3), 264),
    ((64, 128, 4, 2), 264),
    ((64, 128, 4, 4), 264),
    ((64, 128, 8, 3), 264),
    ((64, 256, 4, 2), 264),
    ((64, 256, 8, 2), 264),
    ((64, 256, 8, 3), 132),
    ((32, 64, 4, 4), 528),
    ((32, 128, 4, 3), 264),
    ((32, 128, 4, 4), 264),
    ((32, 128, 4, 3), 528),
    ((32, 256, 4, 2), 264),
    ((32, 256, 4, 3), 264),
    ((32, 256, 4, 2), 528),
    ((16, 128, 4, 4), 528),
    ((16, 256, 4, 3), 396),
    ((16, 256, 4, 2), 528),
    ((128, 64, 8, 3), 264),
    ((128, 128, 8, 2), 132),
]
EARLY = [(64, 128, 8), (32, 128, 4)]  # rows, depth, warps; 1,024 columns take 255 registers
# units of 8 rows, warps, chunks a round, rounds in flight, rounds of inputs ahead; launch_dependents,
# registers
STREAM_QKV = [
    (4, 8, 1, 3, 1),
    (4, 8, 1, 3, 2),
    (4, 8, 1, 2, 2),
    (4, 4, 1, 6, 2),
    (4, 4, 2, 3, 2),
    (5, 8, 1, 2, 2),
    (5, 8, 1, 2, 3),
    (2, 8, 1, 6, 1),
    (2, 8, 1, 6, 2),
    (2, 8, 1, 4, 2),
    (2, 8, 2, 3, 1),
    (2, 4, 1, 6, 2),
    (2, 4, 2, 4, 1),
    (2, 4, 1, 12, 2),
    (2, 8, 1, 6, 1, 2, 80),
    (2, 8, 1, 6, 2, 2, 80),
    (2, 8, 1, 6, 2, 1, 80),
    (2, 8, 1, 6, 2, 0, 80),
    (4, 8, 1, 3, 2, 0),
    (4, 8, 1, 3, 2, 1),
    (1, 4, 2, 4, 1),
    (1, 4, 1, 12, 2),
    (2, 16, 1, 3, 2),
    (2, 16, 1, 2, 2),
]
STREAM_OUT = [
    (2, 8, 1, 6, 4),
    (2, 8, 2, 3, 2),
    (2, 8, 2, 3, 4),
    (2, 8, 1, 6, 8),
    (2, 8, 1, 6, 16),
    (2, 8, 1, 4, 4),
    (2, 16, 1, 3, 4),
    (2, 16, 1, 3, 8),
    (2, 4, 2, 6, 4),
    (2, 4, 1, 6, 4),
    (2, 4, 1, 12, 8),
    (3, 8, 1, 4, 4),
    (3, 8, 1, 4, 8),
    (3, 8, 2, 2, 4),
    (3, 16, 1, 2, 4),
    (3, 16, 1, 2, 8),
    (2, 8, 1, 6, 8, 0),
    (2, 8, 1, 6, 8, 1),
    (3, 8, 1, 4, 8, 0),
    (1, 8, 1, 8, 8),
    (1, 8, 1, 12, 8),
    (1, 4, 1, 16, 8),
    (1, 4, 2, 8, 4),
    (4, 8, 1, 3, 4),
    (4, 8, 1, 3, 8),
]


def variants() -> dict[str, dict[str, Op]]:
    """By op ("qkv", "out") and name. Those of ``stream`` that cannot be for 9 tokens and more fail there."""
    qkv: dict[str, Op] = {}
    out: dict[str, Op] = {}
    for shape, programs in SPLIT:
        name = f"split {'x'.join(map(str, shape))} p{programs}"
        first = (shape, programs) == SPLIT[0]
        heads = ((4, 4), (16, 4), (8, 4), (2, 4), (4, 2)) if first else ((4, 4),)
        for each in heads:
            qkv[f"{name} rotate {each[0]}x{each[1]}"] = functools.partial(split_qkv, shape, programs, *each)
        blocks = ((128, 1), (512, 4), (256, 2), (128, 4), (64, 1)) if first else ((128, 1),)
        for each in blocks:
            out[f"{name} add {each[0]}x{each[1]}"] = functools.partial(split_out, shape, programs, *each)
    for early in EARLY:
        qkv[f"early {early}"] = functools.partial(early_qkv, early)
        out[f"early {early}"] = functools.partial(early_out, early)
    for stream in STREAM_QKV:
        qkv[f"stream {stream}"] = functools.partial(stream_qkv, tuning.SkinnyConfig(*stream))
    for stream in STREAM_OUT:
        out[f"stream {stream}"] = functools.partial(stream_out, tuning.SkinnyConfig(*stream))
    return {"qkv": qkv, "out": out}


# ------------------------------------------------------------------ errors


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def exact_qkv(case: Case, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, keys and values [T, 2 Nkv, D]) in float32."""
    sizes, x = case.sizes, case.x
    y = (x * layer.norm) @ layer.qkv.float().t() / (x.square().mean(1, keepdim=True) + EPS).sqrt()
    y = (y + layer.qkv_bias.float()).view(x.shape[0], -1, sizes.dim)
    half = sizes.dim // 2
    cos, sin = case.rope[:, None, :half], case.rope[:, None, half:]
    turned = torch.cat(
        (y[..., :half] * cos - y[..., half:] * sin, y[..., half:] * cos + y[..., :half] * sin), -1
    )
    turned[:, sizes.num_q + sizes.num_kv :] = y[:, sizes.num_q + sizes.num_kv :]
    return turned[:, : sizes.num_q], turned[:, sizes.num_q :]


def written(case: Case) -> torch.Tensor:
    """What is in the slots: [T, 2 Nkv, D]; everything else has to be zero."""
    page = case.sizes.page
    cells = case.kv[case.slots // page, :, :, case.slots % page]
    nonzero = int((case.kv != 0).any(-1).sum())
    if nonzero > case.slots.numel() * 2 * case.sizes.num_kv:
        raise AssertionError("wrote into another slot")
    return cells.flatten(1, 2)


def check(kind: str, op: Op, case: Case, layer: Layer) -> float:
    """Relative error of one call; also that a second gives the same bits."""
    found: list[torch.Tensor] = []
    before = case.x.clone()
    for _ in range(2):
        case.q.zero_()
        case.kv.zero_()
        case.x.copy_(before)
        op(case, layer)
        found.append(torch.cat((case.q, written(case)), 1).clone() if kind == "qkv" else case.x - before)
    case.x.copy_(before)
    if not torch.equal(*found):
        raise AssertionError("another result the second time")
    if kind == "qkv":
        return relative(found[0], torch.cat(exact_qkv(case, layer), 1))
    exact = case.attended.float() @ layer.out.float().t() + layer.out_bias.float()
    return relative(found[0], exact)


# ------------------------------------------------------------------ times


def chain(case: Case, layers: list[Layer], qkv: Op | None, out: Op | None) -> None:
    for layer in layers:
        if qkv is not None:
            qkv(case, layer)
        attend(case.q, case.attended)
        if out is not None:
            out(case, layer)
        damp(case.x)


def chain_us(case: Case, layers: list[Layer], qkv: Op | None, out: Op | None, dry: bool) -> float:
    if dry:
        chain(case, layers, qkv, out)
        return 0.0
    return graph_seconds(lambda: chain(case, layers, qkv, out), 15) * 1e6 / len(layers)


def made(sizes: Sizes, tokens: int, layers: list[Layer], device: str, wide: bool) -> tuple[Case, list[Layer]]:
    """``wide``: in float32, because the interpreter cannot multiply bfloat16."""
    if not wide:
        return Case(sizes, tokens, device), layers
    return Case(sizes, tokens, device, torch.float32), [as_float32(layer) for layer in layers]


def time_tokens(sizes: Sizes, tokens: int, some_layers: list[Layer], device: str, dry: bool) -> None:
    every, layers = variants(), some_layers
    case = Case(sizes, tokens, device)
    alone = chain_us(case, layers, None, None, dry)
    print(f"T={tokens}: stand-ins alone {alone:.2f} us a layer", flush=True)
    best: dict[str, tuple[float, str]] = {}
    for kind, some in every.items():
        lines = []
        for name, op in some.items():
            try:
                case, layers = made(sizes, tokens, some_layers, device, dry and "stream" not in name)
                error = check(kind, op, case, layers[0])
                ops = (op, None) if kind == "qkv" else (None, op)
                us = chain_us(case, layers, *ops, dry) - alone
            except Exception as problem:
                told = str(problem).strip().splitlines() or [""]
                RESULTS[f"{kind} {tokens} {name}"] = {"failed": f"{type(problem).__name__} {told[0][:150]}"}
                if not isinstance(problem, ValueError):
                    print(f"  {kind} T={tokens} {name}: {type(problem).__name__} {told[0][:150]}", flush=True)
                continue
            RESULTS[f"{kind} {tokens} {name}"] = {"us": us, "error": error}
            wrong = "" if error < 6e-3 else "  WRONG"
            lines.append((us, name, f"  {kind} T={tokens:2} {us:6.2f} us  error {error:.1e}  {name}{wrong}"))
            if not wrong:
                best[kind] = min(best.get(kind, (us, name)), (us, name))
        for _, _, line in sorted(lines):
            print(line, flush=True)
    case, layers = made(sizes, tokens, some_layers, device, False)
    whole(tokens, case, layers, every, best, alone, dry)


def whole(
    tokens: int,
    case: Case,
    layers: list[Layer],
    every: dict[str, dict[str, Op]],
    best: dict[str, tuple[float, str]],
    alone: float,
    dry: bool,
) -> None:
    """Both ops in one chain: as split products, and the best of each."""
    pairs = {"split": tuple(next(iter(some)) for some in every.values())}
    if len(best) == 2:
        pairs["best"] = (best["qkv"][1], best["out"][1])
    for label, (qkv, out) in pairs.items():
        us = chain_us(case, layers, every["qkv"][qkv], every["out"][out], dry) - alone
        RESULTS[f"both {tokens} {label}"] = {"us": us, "qkv": qkv, "out": out}
        print(f"both T={tokens:2} {label}: {us:6.2f} us  ({qkv} | {out})", flush=True)


# ------------------------------------------------------------------ compiling ahead, in parallel


def compile_some(share: int, of: int) -> None:
    """Runs every ``of``-th variant once, so that its machine code is in the cache."""
    jobs = [(kind, name, op) for kind, some in variants().items() for name, op in some.items()]
    layer = make_layer(REAL, "cuda")
    for _, name, op in jobs[share::of]:
        for tokens in (8, 16):
            try:
                op(Case(REAL, tokens, "cuda"), layer)
                torch.cuda.synchronize()
            except ValueError:
                pass
            except Exception as error:
                sys.stderr.write(f"{name}: {type(error).__name__} {str(error)[:200]}\n")


def compile_ahead(workers: int) -> None:
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    crew = [spawn.Process(target=compile_some, args=(n, workers)) for n in range(workers)]
    for each in crew:
        each.start()
    for each in crew:
        each.join(150)
        if each.is_alive():
            each.terminate()
    codes = [each.exitcode for each in crew]
    print(f"compiled in {time.monotonic() - began:.0f} s, exit codes {codes}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 4, 16, 2])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="on a CPU, in Triton's interpreter")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes, device = (SMALL, "cpu") if options.dry else (REAL, "cuda")
    if options.dry:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.support.kernels import skinny_machine

        skinny_machine.install()
    else:
        compile_ahead(options.workers)
    layers = [make_layer(sizes, device) for _ in range(1 if options.dry else options.layers)]
    try:
        for tokens in options.tokens:
            time_tokens(sizes, tokens, layers, device, options.dry)
            if options.json is not None:
                options.json.write_text(json.dumps(RESULTS, indent=1))
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
