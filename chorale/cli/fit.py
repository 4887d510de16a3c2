"""``chorale fit MODEL``: what fits on this machine, before anything is downloaded. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from chorale.cli import machine
from chorale.cli.help import wants_help
from chorale.cli.settings import Settings, merge
from chorale.errors import ConfigError
from chorale.model.config import ModelConfig
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.hardware import Hardware, available_memory, cpu_count, total_memory
from chorale.runtime.memory import gib, weight_bytes
from chorale.runtime.resolve import Resolved, resolve

USAGE = """usage: chorale fit MODEL [the options of chorale serve]

MODEL: openai/gpt-oss-20b, openai/gpt-oss-120b, or a folder. Nothing is downloaded."""


def run(arguments: list[str]) -> int:
    if not arguments or wants_help(arguments):
        print(USAGE)
        return 0
    settings = merge(arguments, os.environ)
    model = find_config(settings)
    code = 0
    for hardware in find_hardware(settings):
        code = max(code, report(settings, model, hardware))
    return code


def find_config(settings: Settings) -> ModelConfig:
    """The shape of the model: known by name, or read from a folder. Nothing is downloaded."""
    name = settings.engine.model
    folder = Path(name).expanduser()
    if (folder / "config.json").exists():
        return ModelConfig.load(folder)
    if name == "demo":
        from chorale.demo import ensure_demo

        return ModelConfig.load(ensure_demo())
    for key, shape in SHAPES.items():
        if name.rstrip("/").split("/")[-1] == f"gpt-oss-{key}":
            return make_config(**shape)
    raise ConfigError(f"{name!r} is neither a folder with a config.json nor gpt-oss-20b or gpt-oss-120b")


def find_hardware(settings: Settings) -> list[Hardware]:
    """The GPUs, or the CPU where there is none or it was asked for."""
    gpus = [] if settings.engine.device == "cpu" else machine.gpus()
    if gpus:
        return [Hardware("cuda", gpu.name, gpu.total_bytes, gpu.free_bytes) for gpu in gpus[:1]]
    if settings.engine.device == "cuda":
        raise ConfigError("--device cuda: nvidia-smi shows no GPU")
    name = f"{machine.cpu_name()}, {cpu_count()} cores"
    return [Hardware("cpu", name, total_memory(), available_memory())]


def report(settings: Settings, model: ModelConfig, hardware: Hardware) -> int:
    """Print the arithmetic; exit code 0 if it fits, 1 if not."""
    print(f"model     {settings.engine.model}: {model.num_parameters / 1e9:.2f} B parameters")
    print(f"machine   {hardware.name}, {gib(hardware.free_bytes)} free of {gib(hardware.total_bytes)}")
    on_gpu = hardware.kind == "cuda"
    try:
        resolved = resolve(settings.engine, model, hardware, can_overlap=on_gpu, can_capture=on_gpu)
    except ConfigError as error:
        weights = weight_bytes(model, "bfloat16")
        print(f"weights   {gib(weights)}")
        if weights > hardware.free_bytes:
            print(
                f"does not fit: the weights alone need {gib(weights - hardware.free_bytes)} more than is free"
            )
        else:
            print(f"does not fit: {error.message}")
        return 1
    show(model, resolved)
    return 0


def show(model: ModelConfig, resolved: Resolved) -> None:
    limits, geometry = resolved.limits, resolved.geometry
    tokens = geometry.tokens_in(limits.num_blocks)
    full = limits.num_blocks // geometry.blocks_for(limits.max_model_len)
    short = limits.num_blocks // geometry.blocks_for(min(2048, limits.max_model_len))
    weights = gib(weight_bytes(model, resolved.dtype))
    kinds = f"{'' if model.dense_experts else 'experts packed in MXFP4, the rest '}{resolved.dtype}"
    print(f"weights   {weights} ({kinds})")
    pool = gib(limits.num_blocks * geometry.bytes_per_block)
    print(f"KV pool   {pool}: {tokens:,} tokens of context in {resolved.kv_dtype}")
    print(f"requests  {full:,} at the full {limits.max_model_len:,} tokens, or {short:,} of 2,048 tokens")
    for decision in resolved.decisions:
        if decision.chosen:
            print(f"          {decision}")
    for note in resolved.notes:
        print(f"note      {note}")
    print("fits")
