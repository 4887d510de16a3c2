"""``chorale warm MODEL``: compiles every kernel that a server needs, for example while an image is built."""

from __future__ import annotations

import importlib.util
import os
import textwrap

from chorale.cli.commands.machine.fit import find_config, take_gpus
from chorale.config.engine import EngineConfig
from chorale.config.options.help import wants_help
from chorale.config.options.settings import merge
from chorale.errors import ConfigError, install_hint
from chorale.machine.gpus import MODELS, find_gpu, hardware_of, kind_of
from chorale.model.config import ModelConfig

USAGE = """usage: chorale warm MODEL [--gpu NAME] [the options of chorale serve]

Compiles every kernel that chorale serve needs with the same options and puts it
into Triton's cache (TRITON_CACHE_DIR, else ~/.triton/cache), so that the server
starts without compiling: in an image, or on a disk that servers share.
MODEL: gpt-oss-20b, gpt-oss-120b, demo, or a folder. Nothing is downloaded.
--gpu NAME compiles for the named GPU instead of this machine's.
"""
_STEP = 10  # percent of the kernels between two printed lines


def run(arguments: list[str]) -> int:
    if not arguments or wants_help(arguments):
        known = ", ".join(model.name for model in MODELS)
        print(USAGE + textwrap.fill(known, 78, initial_indent="  ", subsequent_indent="  "))
        return 0
    rest, names = take_gpus(arguments)
    engine = merge(rest, os.environ).engine
    check(engine, names)
    model = find_config(engine.model)
    if (reason := why_nothing(engine, model, names)) is not None:
        print(f"nothing to compile: {reason}")
        return 0
    compile_kernels(engine, model, names)
    return 0


def check(engine: EngineConfig, names: list[str]) -> None:
    """Raises ``ConfigError`` for options that contradict the command."""
    if len(names) > 1:
        raise ConfigError(f"--gpu {' '.join(names)}: one GPU at a time; run chorale warm once for each")
    if names and engine.device == "cpu":
        raise ConfigError("--gpu and --device cpu cannot be combined")
    if not engine.precompile_kernels:
        raise ConfigError(
            "--no-precompile-kernels: a server with this option does not use precompiled kernels"
        )


def why_nothing(engine: EngineConfig, model: ModelConfig, names: list[str]) -> str | None:
    """Returns why a server with these options compiles no kernel, or None if it compiles some."""
    if engine.device == "cpu":
        return "--device cpu runs without kernels"
    if engine.ops == "reference":
        return "--ops reference runs without kernels"
    if engine.ops == "auto" and model.dense_experts:
        return f"the experts of {engine.model} are not MXFP4, so it runs on the reference ops"
    if names:
        gpu = find_gpu(names[0])
        return None if kind_of(gpu) != "npu" else f"{gpu.name} runs plain torch ops, without kernels"
    from chorale.machine.hardware import why_no_cuda

    if engine.model == "demo" and (why := why_no_cuda()) is not None:
        return f"{why}, so the demo model runs on the CPU (--gpu NAME compiles for a GPU that is not here)"
    return None


def compile_kernels(engine: EngineConfig, model: ModelConfig, names: list[str]) -> None:
    """Compiles the kernels and prints progress. Raises ``ConfigError`` or ``ChoraleError``."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"triton is not installed; install the servers' version: {install_hint('kernels')}")
    from chorale.serve.engine.warm import Target, local_target, warm  # imports torch and Triton

    if names:
        gpu = find_gpu(names[0])
        target = Target(hardware_of(gpu), gpu.architecture, gpu.multiprocessors)
    else:
        target = local_target()
    shown = f"{target.hardware.name} ({target.architecture}, {target.multiprocessors} multiprocessors)"
    print(f"{engine.model} on {shown}", flush=True)
    found = warm(engine, model, target, Steps())
    if found.num_kernels:
        print(f"{found.num_kernels} kernels compiled in {found.seconds:.0f} s, in {found.folder}")
    else:
        print(f"all kernels are in {found.folder} already")


class Steps:
    """Prints a line for every tenth of the kernels."""

    def __init__(self) -> None:
        self._percent = 0

    def __call__(self, phase: str, fraction: float | None = None, message: str = "") -> None:
        percent = int((fraction or 0) * 100)
        if percent >= self._percent + _STEP:
            self._percent = percent
            print(message, flush=True)
