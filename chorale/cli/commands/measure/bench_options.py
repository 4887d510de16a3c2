"""The options of the benchmarks. Those of ``chorale bench serve`` are vLLM's."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from chorale.cli.commands.measure.vllm_options import add_vllm_options
from chorale.config.model_names import SIZES
from chorale.config.options.parser import Parser
from chorale.config.sampling_fields import CHOSEN_BY_MODEL, SAMPLING_FIELDS
from chorale.errors import ConfigError
from chorale.machine.hardware import cpu_count
from chorale.measure.bench.prompts import CHAT_ENDPOINT
from chorale.model.config_writer import SHAPES

OTHERS = "Also takes MODEL and all options of chorale serve."
BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": CHAT_ENDPOINT,
    "sglang-oai": "/v1/completions",
    "sglang-oai-chat": CHAT_ENDPOINT,
}
Group = argparse.ArgumentParser | argparse._ArgumentGroup


def add(made: Group, names: str, kind: Any, default: Any, about: str, **more: Any) -> None:
    """Adds an option. ``names``: its spellings; ``kind``: how its value is read, ``bool`` for a switch."""
    more |= {"action": "store_true"} if kind is bool else {"type": kind, "default": default}
    made.add_argument(*names.split(), help=about, **more)


def _parser(name: str, about: str, words: str = "[options]") -> Parser:
    made = Parser(f"chorale bench {name}", usage=f"chorale bench {name} {words}", description=about)
    add_vllm_options(made, name)
    return made


def _lengths(made: Parser, input_len: int, output_len: int) -> None:
    add(made, "--input-len", int, input_len, "prompt length in tokens")
    add(made, "--output-len", int, output_len, "output length in tokens")
    add(made, "--temperature", float, 1.0, "0 is greedy")
    add(made, "--seed", int, 0, "")
    _output(made)


def _output(made: Parser) -> None:
    add(made, "--output-json --json", _result_file, None, "file to write the result to", dest="json")


def _result_file(text: str) -> Path:
    """Returns the path. Raises ``ConfigError`` if it is not writable, before anything is measured."""
    path = Path(text)
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise ConfigError(f"--output-json {path}: cannot be written to")
    return path


def latency_parser() -> Parser:
    made = _parser("latency", f"One batch through the engine, without HTTP, several times. {OTHERS}")
    add(made, "--batch-size", int, 8, "concurrent requests")
    add(made, "--num-iters-warmup", int, 1, "runs before the measurement, not counted")
    add(made, "--num-iters", int, 3, "measured runs")
    _lengths(made, 32, 128)
    return made


def throughput_parser() -> Parser:
    made = _parser("throughput", f"Many requests through the engine at once, without HTTP. {OTHERS}")
    add(made, "--num-prompts", int, 1000, "requests")
    _lengths(made, 1024, 128)
    return made


def startup_parser() -> Parser:
    made = _parser("startup", f"Start-up to the first token, with empty and with filled caches. {OTHERS}")
    add(made, "--num-iters-cold", int, 1, "starts with empty caches")
    add(made, "--num-iters-warm", int, 3, "starts with filled caches")
    add(made, "--timeout", float, 600.0, "seconds allowed for one start")
    _output(made)
    return made


def kernels_parser() -> Parser:
    about = "Time each Triton kernel at gpt-oss's sizes, with random weights, inside a CUDA graph."
    made = _parser("kernels", about)
    add(made, "--model", str, "20b", "model size", choices=SIZES)
    add(made, "--batch-sizes", str, "1,8,64,256,1024", "numbers of rows")
    add(made, "--context", int, 1024, "cached tokens of each row")
    add(made, "--layers", int, 8, "layers of weights, enough to exceed every cache")
    add(made, "--peak-tb-s", float, 4.62, "measured read bandwidth of this GPU")
    add(made, "--peak-tflop-s", float, 694.0, "measured bf16 rate of this GPU")
    _output(made)
    return made


def make_checkpoint_parser() -> Parser:
    about = "Write random weights in the published layout, for measuring speed only."
    made = _parser("make-checkpoint", about, "{20b,120b,puzzle-88b} FOLDER [options]")
    add(made, "size", str, None, "model size", choices=sorted(SHAPES, key=len))
    add(made, "folder", Path, None, "a new or empty folder", metavar="FOLDER")
    add(made, "--seed", int, 0, "")
    add(made, "--device", str, "auto", "", choices=("auto", "cpu", "cuda"))
    add(made, "--threads", int, min(12, cpu_count()), "writer threads")
    return made


def report_parser() -> Parser:
    about = "Render result files (--save-result, --output-json) as one self-contained HTML page."
    made = _parser("report", about, "RESULT... [options]")
    add(made, "results", Path, None, "JSON result files", nargs="+", metavar="RESULT")
    add(made, "--out", Path, Path("report.html"), "the HTML file to write")
    return made


def serve_parser() -> Parser:
    about = "Measure a running server under load. Flags, output and result keys are vLLM's."
    made = Parser("chorale bench serve", usage="chorale bench serve [options]", description=about)
    where = made.add_argument_group("server")
    add(where, "--backend", str, "openai", "API to use", choices=sorted(BACKENDS))
    add(where, "--base-url", str, None, "http://HOST:PORT (instead of --host and --port)")
    add(where, "--host", str, "127.0.0.1", "host of the server")
    add(where, "--port", int, 8000, "port of the server")
    add(where, "--endpoint", str, None, "path (default: the backend's)")
    add(where, "--model", str, None, "model name (default: the server's first)")
    add(where, "--served-model-name", str, None, "model name to send, if it differs from --model")
    more = {"action": "append", "metavar": "NAME=VALUE"}
    add(where, "--header", str, [], "header to send with each request", **more)
    _add_workload(made.add_argument_group("workload"))
    _add_pace(made.add_argument_group("request rate"))
    _add_results(made.add_argument_group("results"))
    add_vllm_options(made, "serve")
    return made


def _add_workload(made: Group) -> None:
    kinds = ("random", "custom", "sharegpt")
    add(made, "--dataset-name", str, "random", "source of the prompts", choices=kinds)
    about = "file with the dataset custom (JSON lines with a prompt) or sharegpt"
    add(made, "--dataset-path", Path, None, about)
    add(made, "--num-prompts", int, 1000, "number of requests")
    add(made, "--input-len --random-input-len", int, 1024, "prompt length in tokens")
    add(made, "--output-len --random-output-len", int, None, "output length in tokens")
    add(made, "--custom-output-len", answer_length, None, "output length for custom", metavar="N")
    add(made, "--sharegpt-output-len", int, None, "output length for sharegpt", metavar="N")
    add(made, "--random-range-ratio", float, 0.0, "lengths vary by up to this fraction")
    add(made, "--random-prefix-len", int, 0, "length of a prefix common to all prompts")
    add(made, "--ignore-eos", bool, False, "always generate the full output length")
    add(made, "--seed", int, 0, "seed of prompts, lengths and arrival times")
    add(made, "--extra-body", _json, {}, "fields to add to each body", metavar="JSON")
    for name in CHOSEN_BY_MODEL:
        number = int if SAMPLING_FIELDS[name].type == "integer" else float
        add(made, "--" + name.replace("_", "-"), number, None, SAMPLING_FIELDS[name].doc)


def _add_pace(made: Group) -> None:
    add(made, "--request-rate", float, math.inf, "requests per second")
    add(made, "--burstiness", float, 1.0, "1: Poisson arrivals; lower values: burstier")
    curves = ("linear", "exponential")
    add(made, "--ramp-up-strategy", str, None, "change the rate over the run", choices=curves)
    add(made, "--ramp-up-start-rps", float, None, "requests per second at the start", metavar="X")
    add(made, "--ramp-up-end-rps", float, None, "requests per second at the end", metavar="X")
    add(made, "--max-concurrency", int, None, "maximum number of concurrent requests")
    add(made, "--num-warmups", int, 0, "requests to send before the measurement, not counted")
    about = "client processes (default: one per 256 concurrent requests)"
    add(made, "--client-processes", int, None, about)


def _add_results(made: Group) -> None:
    add(made, "--percentile-metrics", str, "ttft,tpot,itl,e2el", "metrics to print")
    add(made, "--metric-percentiles", str, "99", "percentiles, separated by commas")
    about = "count the requests that stay within these limits for ttft, tpot, e2el"
    add(made, "--goodput", str, [], about, nargs="+", metavar="NAME:MS")
    add(made, "--save-result", bool, False, "write a JSON file")
    add(made, "--save-detailed", bool, False, "include each request in the file")
    add(made, "--result-dir", Path, Path(), "folder of the file")
    add(made, "--result-filename", str, None, "name of the file (default: from rate, model and date)")
    add(made, "--metadata", str, [], "entries to add to the file", nargs="*", metavar="KEY=VALUE")
    add(made, "--label", str, None, "prefix of the file name")
    add(made, "--disable-tqdm --no-progress", bool, False, "show no progress bar", dest="quiet")


def answer_length(text: str) -> int | None:
    """Parses an output length. Returns None for ``-1``, vLLM's notation for the dataset's own lengths."""
    length = int(text)
    return None if length == -1 else length


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body {text!r}: is not JSON ({error})") from None


PARSERS = {
    "serve": serve_parser,
    "latency": latency_parser,
    "throughput": throughput_parser,
    "startup": startup_parser,
    "kernels": kernels_parser,
    "make-checkpoint": make_checkpoint_parser,
    "report": report_parser,
}
