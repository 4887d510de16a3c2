"""``chorale bench latency | throughput | startup | kernels | make-checkpoint | report``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from chorale.cli.commands.measure.bench_options import PARSERS
from chorale.client.base import EngineInfo
from chorale.config.engine import check_least
from chorale.config.options.parse import flag_names
from chorale.config.options.parser import Parser, whole_names
from chorale.config.options.settings import merge
from chorale.config.speculative import SpeculativeConfig
from chorale.errors import ConfigError
from chorale.machine.facts import fingerprint
from chorale.machine.folders import write_whole
from chorale.machine.signals import signals_as_exceptions
from chorale.measure.bench.drafts import SYNTHETIC
from chorale.model.config_writer import SHAPES


def run(name: str, arguments: list[str]) -> int:
    return {
        "latency": latency, "throughput": throughput, "startup": startup, "kernels": kernels,
        "make-checkpoint": make_checkpoint, "report": report,
    }[name](arguments)  # fmt: skip


def _split(made: Parser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the benchmark's own options and those of ``chorale serve``. Both may be abbreviated."""
    names = flag_names() | made.option_names
    return made.parse_known_args(whole_names(arguments, names))


def _conclude(kind: str, found: dict[str, Any], path: Path | None, **more: Any) -> int:
    """Prints a result and writes it to ``path``. A synthetic acceptance rate is marked in each line."""
    mark = f"    ({SYNTHETIC})" if more.get("synthetic_acceptance") else ""
    for name, value in found.items():
        if isinstance(value, list):
            value = " ".join(f"{each:.3g}" for each in value)
        print(
            f"{name.replace('_', ' ') + ':':<40} {value:,.4g}{mark}"
            if isinstance(value, float)
            else f"{name}: {value}{mark}"
        )
    if path is not None:
        write_whole(path, json.dumps({"kind": kind, "machine": fingerprint()} | more | found, indent=1))
        print(f"wrote {path}")
    return 0


def _build(rest: list[str]) -> tuple[Any, dict[str, Any]]:
    """Builds an engine from options of ``chorale serve``, with prefix caching off by default.

    Returns the engine and its entries in the result file.
    """
    from chorale.serve.engine.build import build_engine

    asked = any(text.startswith("--enable-prefix-caching") for text in rest)
    settings = merge(rest if asked else [*rest, "--no-enable-prefix-caching"], os.environ)
    for notice in settings.notices:
        print(f"note: {notice}")
    core, info = build_engine(settings.engine)
    return core, described(info, settings.engine.speculative_config)


def described(info: EngineInfo, speculative: SpeculativeConfig | None) -> dict[str, Any]:
    """Returns the result file's entries about the model and speculation. Prints the speculation."""
    found: dict[str, Any] = {"model": info.model}
    if speculative is not None:
        print(f"speculation: {speculative}")
        found["speculative_config"] = dataclasses.asdict(speculative)
        if speculative.is_synthetic:
            found["synthetic_acceptance"] = True
    return found


def latency(arguments: list[str]) -> int:
    """Measures one batch through the engine, without HTTP, several times."""
    given, rest = _split(PARSERS["latency"](), arguments)
    check_least(given, {"batch_size": 1, "input_len": 1, "output_len": 1, "num_iters": 1, "seed": 0})
    from chorale.measure.bench import offline

    core, about = _build(rest)
    batch = offline.Batch(given.batch_size, given.input_len, given.output_len, given.temperature, given.seed)
    found = offline.latency(core, batch, warmups=given.num_iters_warmup, repeats=given.num_iters)
    return _conclude("latency", found, given.json, **about)


def throughput(arguments: list[str]) -> int:
    """Measures many requests through the engine, without HTTP, all submitted at the start."""
    given, rest = _split(PARSERS["throughput"](), arguments)
    check_least(given, {"num_prompts": 1, "input_len": 1, "output_len": 1, "seed": 0})
    from chorale.measure.bench import offline

    core, about = _build(rest)
    batch = offline.Batch(given.num_prompts, given.input_len, given.output_len, given.temperature, given.seed)
    return _conclude("throughput", offline.throughput(core, batch), given.json, **about)


def startup(arguments: list[str]) -> int:
    """Measures start-up to the first token, with empty and with filled caches."""
    given, rest = _split(PARSERS["startup"](), arguments)
    check_least(given, {"num_iters_cold": 0, "num_iters_warm": 0})
    if given.num_iters_cold + given.num_iters_warm == 0:
        raise ConfigError("--num-iters-cold 0 and --num-iters-warm 0 leave nothing to measure")
    if not given.timeout > 0:
        raise ConfigError("--timeout must be above 0")
    from chorale.measure.bench.startup import startup as measure

    settings = merge(rest, os.environ)  # reports a wrong option before a server is started
    with signals_as_exceptions():
        found = measure(
            rest, cold=given.num_iters_cold, warm=given.num_iters_warm, timeout=given.timeout,
            api_keys=settings.api_keys,
        )  # fmt: skip
    return _conclude("startup", found, given.json)


def kernels(arguments: list[str]) -> int:
    given = PARSERS["kernels"]().read(arguments)
    try:
        sizes = [int(text) for text in given.batch_sizes.split(",")]
    except ValueError:
        raise ConfigError(
            f"--batch-sizes {given.batch_sizes}: must be integers separated by commas"
        ) from None
    from chorale.measure.bench.kernels import measure_kernels

    rows = measure_kernels(
        SHAPES[given.model], sizes, given.context,
        layers=given.layers, peak_bytes=given.peak_tb_s * 1e12, peak_flops=given.peak_tflop_s * 1e12,
    )  # fmt: skip
    print(f"{'kernel':<10} {'case':<24} {'us':>9} {'GB/s':>8} {'TFLOP/s':>9} {'share':>7}")
    for row in rows:
        figures = f"{row['us']:>9.2f} {row['gb_s']:>8.0f} {row['tflop_s']:>9.1f} {row['share']:>7.1%}"
        print(f"{row['kernel']:<10} {row['case']:<24} {figures}")
    return _conclude("kernels", {}, given.json, model=given.model, kernels=rows)


def make_checkpoint(arguments: list[str]) -> int:
    given = PARSERS["make-checkpoint"]().read(arguments)
    check_least(given, {"threads": 1})
    _check_new_folder(given.folder)
    import torch

    from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
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


def _check_new_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty")


def report(arguments: list[str]) -> int:
    given = PARSERS["report"]().read(arguments)
    from chorale.measure.bench.report import write_report

    write_report(given.results, given.out)
    print(f"wrote {given.out}")
    return 0
