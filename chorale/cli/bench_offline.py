"""``chorale bench latency | throughput | startup | kernels | make-checkpoint | report``."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from chorale.cli.fingerprint import fingerprint
from chorale.cli.settings import merge
from chorale.errors import ConfigError
from chorale.model.config_writer import SHAPES


def run(name: str, arguments: list[str]) -> int:
    return {
        "latency": latency, "throughput": throughput, "startup": startup, "kernels": kernels,
        "make-checkpoint": make_checkpoint, "report": report,
    }[name](arguments)  # fmt: skip


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(f"chorale bench {name}", description=about, allow_abbrev=False)


def _lengths(made: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    made.add_argument("--input-len", type=int, default=input_len)
    made.add_argument("--output-len", type=int, default=output_len)
    made.add_argument("--temperature", type=float, default=1.0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--output-json", "--json", dest="json", type=Path)


def _conclude(kind: str, found: dict[str, Any], path: Path | None, **more: Any) -> int:
    for name, value in found.items():
        print(
            f"{name.replace('_', ' ') + ':':<40} {value:,.4g}"
            if isinstance(value, float)
            else f"{name}: {value}"
        )
    if path is not None:
        path.write_text(
            json.dumps({"kind": kind, "machine": fingerprint()} | more | found, indent=1), "utf-8"
        )
        print(f"wrote {path}")
    return 0


def _build(rest: list[str]) -> tuple[Any, str]:
    """An engine from the options of ``chorale serve``, prefix caching off unless it is asked for."""
    from chorale.serve.build import build_engine

    asked = any(text.startswith("--enable-prefix-caching") for text in rest)
    settings = merge(rest if asked else [*rest, "--no-enable-prefix-caching"], os.environ)
    core, info = build_engine(settings.engine)
    return core, info.model


def latency(arguments: list[str]) -> int:
    """The other options are those of ``chorale serve``."""
    made = _parser("latency", latency.__doc__ or "")
    made.add_argument("--batch-size", type=int, default=8)
    made.add_argument("--num-iters-warmup", type=int, default=1)
    made.add_argument("--num-iters", type=int, default=3)
    _lengths(made, 32, 128)
    given, rest = made.parse_known_args(arguments)
    if min(given.batch_size, given.input_len, given.output_len, given.num_iters) < 1:
        raise ConfigError("--batch-size, --input-len, --output-len and --num-iters must be at least 1")
    from chorale.bench import offline

    core, model = _build(rest)
    batch = offline.Batch(given.batch_size, given.input_len, given.output_len, given.temperature, given.seed)
    found = offline.latency(core, batch, warmups=given.num_iters_warmup, repeats=given.num_iters)
    return _conclude("latency", found, given.json, model=model)


def throughput(arguments: list[str]) -> int:
    """The other options are those of ``chorale serve``."""
    made = _parser("throughput", throughput.__doc__ or "")
    made.add_argument("--num-prompts", type=int, default=1000)
    _lengths(made, 1024, 128)
    given, rest = made.parse_known_args(arguments)
    if min(given.num_prompts, given.input_len, given.output_len) < 1:
        raise ConfigError("--num-prompts, --input-len and --output-len must be at least 1")
    from chorale.bench import offline

    core, model = _build(rest)
    batch = offline.Batch(given.num_prompts, given.input_len, given.output_len, given.temperature, given.seed)
    return _conclude("throughput", offline.throughput(core, batch), given.json, model=model)


def startup(arguments: list[str]) -> int:
    """The other options are those of ``chorale serve``."""
    made = _parser("startup", startup.__doc__ or "")
    made.add_argument("--num-iters-cold", type=int, default=1)
    made.add_argument("--num-iters-warm", type=int, default=3)
    made.add_argument("--timeout", type=float, default=600.0)
    made.add_argument("--output-json", "--json", dest="json", type=Path)
    given, rest = made.parse_known_args(arguments)
    from chorale.bench.startup import startup as measure

    merge(rest, os.environ)  # a wrong option is an error here, not a server that never starts
    found = measure(rest, cold=given.num_iters_cold, warm=given.num_iters_warm, timeout=given.timeout)
    return _conclude("startup", found, given.json)


def kernels(arguments: list[str]) -> int:
    made = _parser("kernels", "Each Triton kernel at gpt-oss's sizes, random weights, inside a CUDA graph.")
    made.add_argument("--model", choices=sorted(SHAPES), default="20b")
    made.add_argument("--batch-sizes", default="1,8,64,256,1024")
    made.add_argument("--context", type=int, default=1024)
    made.add_argument("--layers", type=int, default=8, help="of weights, so that no cache holds them")
    made.add_argument("--peak-tb-s", type=float, default=4.62, help="measured read bandwidth of this GPU")
    made.add_argument("--peak-tflop-s", type=float, default=694.0, help="measured bf16 rate of this GPU")
    made.add_argument("--output-json", "--json", dest="json", type=Path)
    given = made.parse_args(arguments)
    from chorale.bench.kernels import measure_kernels

    rows = measure_kernels(
        SHAPES[given.model], [int(text) for text in given.batch_sizes.split(",")], given.context,
        layers=given.layers, peak_bytes=given.peak_tb_s * 1e12, peak_flops=given.peak_tflop_s * 1e12,
    )  # fmt: skip
    print(f"{'kernel':<10} {'case':<24} {'us':>9} {'GB/s':>8} {'TFLOP/s':>9} {'share':>7}")
    for row in rows:
        figures = f"{row['us']:>9.2f} {row['gb_s']:>8.0f} {row['tflop_s']:>9.1f} {row['share']:>7.1%}"
        print(f"{row['kernel']:<10} {row['case']:<24} {figures}")
    return _conclude("kernels", {}, given.json, model=given.model, kernels=rows)


def make_checkpoint(arguments: list[str]) -> int:
    made = _parser("make-checkpoint", "Random weights, published layout. Says nothing about quality.")
    made.add_argument("size", choices=sorted(SHAPES))
    made.add_argument("folder", type=Path)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--threads", type=int, default=min(12, os.cpu_count() or 1))
    given = made.parse_args(arguments)
    if given.folder.exists() and any(given.folder.iterdir()):
        raise ConfigError(f"{given.folder} is not empty")
    import torch

    from chorale.model.checkpoint_writer import write_random_checkpoint
    from chorale.model.config_writer import make_config

    device = given.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    begin = time.perf_counter()
    write_random_checkpoint(
        given.folder, make_config(**SHAPES[given.size]), seed=given.seed, device=device, threads=given.threads
    )
    size = sum(path.stat().st_size for path in given.folder.iterdir())
    print(f"{given.folder}: {size / 1e9:.1f} GB in {time.perf_counter() - begin:.1f} s")
    return 0


def report(arguments: list[str]) -> int:
    made = _parser("report", "Result files (--save-result, --output-json) to one self-contained HTML page.")
    made.add_argument("results", nargs="+", type=Path)
    made.add_argument("--out", type=Path, default=Path("report.html"))
    given = made.parse_args(arguments)
    from chorale.bench.report import write_report

    write_report(given.results, given.out)
    print(f"wrote {given.out}")
    return 0
