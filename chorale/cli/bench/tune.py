"""``chorale bench tune``: measures shapes of Triton kernels, and writes a file for ``--kernel-tuning``."""

from __future__ import annotations

import importlib.util
import os
import time

from chorale.cli.bench.offline_options import writable_file
from chorale.cli.parser import Parser
from chorale.errors import ConfigError
from chorale.model.config_writer import SHAPES

# For trying the command without a GPU, through Triton's interpreter.
TINY = {"layers": 1, "experts": 4, "hidden": 128, "inter": 64, "heads": 4, "kv_heads": 2}
_MOST_TINY, _CONTEXT_TINY = 16, 80


def parser() -> Parser:
    made = Parser(
        "chorale bench tune",
        usage="chorale bench tune --out FILE [options]",
        description="Times shapes of the Triton kernels on this GPU, checks each against the reference ops, "
        "and writes the fastest to a file for chorale serve --kernel-tuning FILE. Run it for each model with "
        "the same file: entries are added.",
    )
    made.add_argument("--out", type=writable_file, required=True, help="file to write or add to")
    made.add_argument("--model", choices=[*sorted(SHAPES, key=len), "tiny"], default="20b", help="model size")
    made.add_argument("--seconds", type=float, default=600.0, help="time after which no shape is begun")
    made.add_argument("--only", default="", help="names of entries, separated by commas; default: all")
    return made


def run(name: str, arguments: list[str]) -> int:
    given = parser().read(arguments)
    if given.seconds <= 0:
        raise ConfigError("--seconds must be above 0")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("the package triton is not installed")
    import torch

    on_cpu = os.environ.get("TRITON_INTERPRET") == "1"
    if not on_cpu and not torch.cuda.is_available():
        raise ConfigError("chorale bench tune needs a GPU")
    from chorale.bench import tune
    from chorale.kernels.triton import table_file

    only = {each for each in given.only.split(",") if each}
    if unknown := only - {each.name for each in tune.TUNABLES}:
        known = ", ".join(each.name for each in tune.TUNABLES)
        raise ConfigError(f"--only {', '.join(sorted(unknown))}: not one of {known}")
    device, tiny = "cpu" if on_cpu else "cuda", given.model == "tiny"
    facts, before = tune.facts(torch.device(device)), []
    if given.out.exists() and given.out.stat().st_size:
        before = table_file.read(given.out, facts["architecture"])
    settings = tune.Settings(TINY if tiny else SHAPES[given.model], device, given.seconds)
    if tiny:
        settings = tune.Settings(
            TINY, device, given.seconds, context=_CONTEXT_TINY, layers=1, vocab=256, most_tokens=_MOST_TINY
        )
    began = time.perf_counter()
    wanted = [each for each in tune.TUNABLES if not only or each.name in only]
    choices, unfinished = tune.tune(settings, wanted, lambda line: print(line, flush=True))
    new = {(each.name, each.tokens, each.experts) for each in choices}
    kept = [each for each in before if (each.name, each.tokens, each.experts) not in new]
    table_file.write(given.out, [*kept, *choices], facts | {"unfinished": unfinished})
    faster = sum(each.shape is not None for each in choices)
    print(f"{faster} shapes are faster on {facts['gpu']}; {time.perf_counter() - began:.0f} s")
    for each in unfinished:
        print(f"not finished: {each}")
    print(f"wrote {given.out}: chorale serve --kernel-tuning {given.out}")
    return 0
