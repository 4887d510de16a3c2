"""``chorale bench``: measurements, each recorded with the machine it ran on."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from chorale.config.suggestions import subcommand

# benchmark -> (module in this package, one line of help)
BENCHES = {
    "serve": ("bench_serve", "load test of any OpenAI-compatible server, with vLLM's flags"),
    "latency": ("bench_offline", "one batch through the engine, without HTTP"),
    "throughput": ("bench_offline", "many requests through the engine, without HTTP"),
    "startup": ("bench_offline", "the start of chorale serve, up to the first token"),
    "kernels": ("bench_offline", "each GPU kernel, compared with the roofline"),
    "make-checkpoint": ("bench_offline", "write random weights in the published size and layout"),
    "report": ("bench_offline", "render result files as one HTML page"),
}


def usage() -> str:
    lines = ["usage: chorale bench WHAT [options]", ""]
    lines += [f"  {name:<16} {line}" for name, (_, line) in BENCHES.items()]
    return "\n".join([*lines, "", "chorale bench WHAT --help shows the options."])


def run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name = arguments[0]
    if name not in BENCHES:
        raise subcommand(name, BENCHES, "benchmark", "chorale bench --help lists them")
    module = importlib.import_module(f"{__package__}.{BENCHES[name][0]}")
    return int(module.run(name, list(arguments[1:])))
