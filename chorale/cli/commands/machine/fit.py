"""``chorale fit MODEL``: computes what fits on a machine, without downloading anything. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from pathlib import Path

from chorale.cli.commands.machine.gpu_plan import (
    ENOUGH,
    SHORT,
    Way,
    make_way,
    recommended,
    remedy,
    table,
    ways,
)
from chorale.config.engine import EngineConfig
from chorale.config.model_names import full_name
from chorale.config.options.help import wants_help
from chorale.config.options.settings import Settings, merge
from chorale.errors import ConfigError
from chorale.kernels.cpu.library import library
from chorale.machine import facts as machine
from chorale.machine import nvidia_smi
from chorale.machine.gpus import MODELS, GpuModel, find_gpus, hardware_of, is_gpu
from chorale.machine.hardware import Hardware, available_memory, check_gpus, cpu_count, total_memory
from chorale.model.config import ModelConfig
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.sizing.kv_pool import LITTLE_CONTEXT
from chorale.runtime.sizing.memory import embedding_bytes, gib, token_bytes, weight_bytes
from chorale.runtime.sizing.resolve import Precision, Resolved, cpu_precision

USAGE = """usage: chorale fit MODEL [--gpu NAME ...] [the options of chorale serve]

Shows whether a model fits, with how much context. MODEL is gpt-oss-20b,
gpt-oss-120b, or a folder. Nothing is downloaded.
--gpu NAME    compute for this GPU instead of this machine's hardware
--gpu 4xNAME  compare the ways to use four GPUs: engines of one or more ranks
              (--tensor-parallel-size and --data-parallel-size restrict them)
NAME is one of:
"""


def run(arguments: list[str]) -> int:
    if not arguments or wants_help(arguments):
        print(USAGE + _wrapped(", ".join(model.name for model in MODELS)))
        return 0
    rest, names = take_gpus(arguments)
    settings = merge(rest, os.environ)
    model = find_config(settings.engine.model)
    code = 0
    for number, (count, hardware, gpu) in enumerate(find_hardware(settings, names)):
        if number:
            print()
        if count is not None and gpu is not None:
            code = max(code, compare(settings, model, count, gpu))
        else:
            code = max(code, report(settings, model, hardware, gpu))
    return code


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 78, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def take_gpus(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits off the names after ``--gpu``: ``--gpu h100 4xh200`` or ``--gpu h100,4xh200``.

    Returns (rest, names).
    """
    others: list[str] = []
    names: list[str] = []
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if token not in ("--gpu", "--gpus") and not token.startswith(("--gpu=", "--gpus=")):
            others.append(token)
            continue
        given = [token.partition("=")[2]] if "=" in token else []
        while rest and not given and not rest[0].startswith("-"):
            given.append(rest.pop(0))
        while rest and "=" not in token and not rest[0].startswith("-") and is_gpu(rest[0]):
            given.append(rest.pop(0))
        found = [name.strip() for text in given for name in text.split(",") if name.strip()]
        if not found:
            raise ConfigError("--gpu needs the name of a GPU, for example --gpu h100")
        names += found
    return others, names


def find_config(name: str) -> ModelConfig:
    """Returns the model's configuration, by name or from a folder, without downloading."""
    folder = Path(name).expanduser()
    if (folder / "config.json").exists():
        return ModelConfig.load(folder)
    if name == "demo":
        from chorale.model.demo import ensure_demo

        return ModelConfig.load(ensure_demo())
    for key, shape in SHAPES.items():
        last = full_name(name).lower().rstrip("/").split("/")[-1]
        if last in (f"gpt-oss-{key}", f"gpt-oss-safeguard-{key}"):
            return make_config(**shape)
    raise ConfigError(
        f"{name!r} is neither a folder with a config.json nor gpt-oss-20b, -120b or -puzzle-88b"
    )


def find_hardware(settings: Settings, names: list[str]) -> list[tuple[int | None, Hardware, GpuModel | None]]:
    """Returns (count, hardware, model) of each named GPU, or else of this machine's GPUs or CPU.

    ``count``: the number in the name (4 in ``4xh100``), None without one. ``model``: None if no GPU is named.
    The hardware is that of one rank: with several ranks on this machine, the GPU with the least free memory,
    or an equal share of the CPU's memory. Raises ``ConfigError`` for options that exclude each other.
    """
    ranks = settings.engine.tensor_parallel_size
    if names:
        if settings.engine.device == "cpu":
            raise ConfigError("--gpu and --device cpu cannot be combined")
        found: list[tuple[int | None, Hardware, GpuModel | None]]
        found = [(count, hardware_of(model), model) for count, model in map(find_gpus, names)]
        for _, hardware, _ in found:
            if settings.engine.device not in ("auto", hardware.kind):
                raise ConfigError(
                    f"--gpu {hardware.name} and --device {settings.engine.device} cannot be combined: "
                    f"it is for --device {hardware.kind}"
                )
        return found
    if settings.engine.device in ("rocm", "npu"):
        example = "mi300x" if settings.engine.device == "rocm" else "ascend-910b"
        raise ConfigError(
            f"--device {settings.engine.device}: fit reads only NVIDIA's driver; name the card, for example "
            f"--gpu {example}"
        )
    gpus = [] if settings.engine.device == "cpu" else machine.gpus()
    if gpus:
        check_gpus(ranks, len(gpus))
        gpu = min(gpus[:ranks], key=lambda each: each.free_bytes)
        capability = nvidia_smi.capability(gpu.uuid)
        hardware = Hardware("cuda", gpu.name, gpu.total_bytes, gpu.free_bytes, capability=capability)
        return [(None, hardware, None)]
    if settings.engine.device == "cuda":
        raise ConfigError(
            "--device cuda: nvidia-smi shows no GPU (--gpu NAME computes for another machine's)"
        )
    name = f"{machine.cpu_name()}, {cpu_count()} cores"
    return [(None, Hardware("cpu", name, total_memory() // ranks, available_memory() // ranks), None)]


def compare(settings: Settings, model: ModelConfig, count: int, gpu: GpuModel) -> int:
    """Prints the capacity of each way to use several GPUs. Returns 0 if one fits, 1 if none does."""
    engine, hardware = settings.engine, hardware_of(gpu)
    ranks, engines = sizes_given(settings)
    found = ways(engine, model, gpu, count, ranks=ranks, engines=engines)
    best = recommended(found, engine.max_model_len or model.max_position_embeddings)
    choice = f"{best[0].flags}: {best[1]}" if best is not None else "none: the model does not fit"
    free, total = gib(hardware.free_bytes), gib(hardware.total_bytes)
    print(f"recommended  {choice}")
    print(f"model        {engine.model}: {model.num_parameters / 1e9:.2f} B parameters")
    print(f"machine      {count} {gpu.name}, each {free} free of {total}")
    print(f"assumed      idle GPUs, --gpu-memory-utilization {engine.gpu_memory_utilization:g}")
    if gpu.state:
        print(f"note         {gpu.state}")
    print("\n".join(table(found, gpu, count)))
    return 0 if best is not None else 1


def sizes_given(settings: Settings) -> tuple[int | None, int | None]:
    """Returns the numbers of ranks and engines, each None if the operator did not set it."""
    given = settings.values.keys()
    ranks = settings.engine.tensor_parallel_size if "tensor-parallel-size" in given else None
    counts = given & {"data-parallel-size", "data-parallel-size-local"}
    return ranks, settings.server.data_parallel_size if counts else None


def report(settings: Settings, model: ModelConfig, hardware: Hardware, gpu: GpuModel | None = None) -> int:
    """Prints the arithmetic. Returns the exit code: 0 if the model fits, 1 if not."""
    print(f"model     {settings.engine.model}: {model.num_parameters / 1e9:.2f} B parameters")
    ranks = settings.engine.tensor_parallel_size
    each = f"{ranks} ranks, each: " if ranks > 1 else ""
    print(f"machine   {each}{hardware.name}, {gib(hardware.free_bytes)} free of {gib(hardware.total_bytes)}")
    if gpu is not None:
        used = settings.engine.gpu_memory_utilization
        print(f"assumed   an idle GPU, --gpu-memory-utilization {used:g}; real figures may differ slightly")
    replicas = settings.server.data_parallel_size
    if replicas > 1:
        show_replicas(hardware, replicas, ranks)
        if hardware.kind == "cpu":
            hardware = dataclasses.replace(hardware, free_bytes=hardware.free_bytes // replicas)
    precision = precision_of_kernels(settings.engine, model) if hardware.kind == "cpu" else None
    way = make_way(settings.engine, model, hardware, replicas, precision)
    resolved = way.resolved
    if resolved is None:
        print(f"weights   {gib(way.weights)}")
        print(f"does not fit: {way.why_not}")
        if found := remedy(settings.engine, model, way.weights, hardware):
            print(f"remedy    {found}")
        return 1
    show(way, resolved, decoded=hardware.decodes_experts, on_cpu=hardware.kind == "cpu")
    if gpu is not None:
        show_gpu(way.part, resolved, gpu)
    if resolved.missing:
        more = gib(resolved.missing)
        print(f"does not fit: weights, activations and KV pool exceed the free memory by {more}")
        return 1
    longest = resolved.limits.max_model_len
    is_short = longest < min(LITTLE_CONTEXT, settings.engine.max_model_len or model.max_position_embeddings)
    print(f"fits, but only with {longest:,} tokens of context" if is_short else "fits")
    return 0


def show_replicas(hardware: Hardware, replicas: int, ranks: int) -> None:
    """Prints the number of engines and their hardware. The lines printed after it are about one engine."""
    if hardware.kind != "cpu":
        each = "such a GPU" if ranks == 1 else f"{ranks} such GPUs"
        where = f"each on {each} ({replicas * ranks} are needed)"
    else:
        where = "which share the memory and the cores"
    print(f"engines   {replicas}, {where}; the figures below are for one")


def precision_of_kernels(config: EngineConfig, model: ModelConfig) -> Precision | None:
    """Returns the precision of the CPU kernels on this machine, or None if they would not be used."""
    has_kernels = config.ops in ("auto", "cpu") and config.tensor_parallel_size == 1
    return cpu_precision(config, model) if has_kernels and library().functions is not None else None


def show(way: Way, resolved: Resolved, *, decoded: bool = False, on_cpu: bool = False) -> None:
    model, limits = way.part, resolved.limits
    full, short = way.requests(way.longest), way.requests(SHORT)
    on_host = embedding_bytes(model, resolved.dtype) if resolved.host_embedding else 0
    weights = gib(weight_bytes(model, resolved.dtype, decoded=decoded, int8=resolved.int8) - on_host)
    is_packed = not (model.dense_experts or decoded)
    rest = "in 8 bits" if resolved.int8 else resolved.dtype
    kinds = f"{'experts packed in MXFP4, the rest ' if is_packed else ''}{rest}"
    elsewhere = f", and {gib(on_host)} in host memory: the input embedding" if on_host else ""
    print(f"weights   {weights} ({kinds}){elsewhere}")
    if not on_cpu:
        print(f"workspace {gib(resolved.workspace)}: steps, graphs and libraries")
    if resolved.drafts is not None:
        own = gib(limits.num_blocks * resolved.drafts.per_block)
        print(f"drafts    {resolved.drafts}, {own} of the KV pool")
    pool = gib(limits.num_blocks * resolved.geometry.bytes_per_block)
    print(f"KV pool   {pool}: {way.tokens:,} tokens of context in {resolved.kv_dtype}")
    if resolved.host_tier is not None:
        buffers = gib(resolved.host_tier.device_bytes)
        print(
            f"host KV   {resolved.host_tier} evicted from the pool, per rank; "
            f"{buffers} of GPU memory for copies"
        )
    longest = f"{limits.max_model_len:,} tokens"
    print(f"requests  {full:,} at once of the maximum {longest}, or {short:,} of 2,048 tokens")
    if on_cpu:
        if full < 2 and not resolved.missing:
            print("advice    for more context: close other programs, or set --kv-cache-memory-bytes")
    elif full < 2 and short < min(ENOUGH, limits.max_num_seqs):
        halves = (
            "--kv-cache-dtype fp8, which holds twice as much, or " if resolved.kv_dtype == "bfloat16" else ""
        )
        print(f"advice    for more requests at once: {halves}a smaller --max-model-len, or another GPU")
    for decision in resolved.decisions:
        if decision.chosen:
            print(f"          {decision}")
    for note in resolved.notes:
        print(f"note      {note}")


def show_gpu(model: ModelConfig, resolved: Resolved, gpu: GpuModel) -> None:
    if gpu.bandwidth is not None:
        read = token_bytes(model, resolved.dtype, compact=resolved.compact)
        most = gpu.bandwidth * 1e12 / read
        speed = f"{gpu.bandwidth:g} TB/s"
        print(f"speed     at most {most:,.0f} tokens/s for one stream: {gib(read)} per token at {speed}")
    if gpu.state and gpu.state not in resolved.notes:
        print(f"note      {gpu.state}")
