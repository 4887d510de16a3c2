"""The ways to divide several equal GPUs into engines of one or more ranks.

For ``chorale fit --gpu 4xh100``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from chorale.config.engine import VALID_SIZES, EngineConfig
from chorale.errors import ConfigError
from chorale.machine.gpus import MODELS, GpuModel, hardware_of
from chorale.machine.hardware import Hardware
from chorale.model.config import ModelConfig
from chorale.runtime.sizing.memory import gib, token_bytes, weight_bytes
from chorale.runtime.sizing.resolve import Precision, Resolved, check_model, resolve, share_of_first

SHORT = 2048  # tokens of a short request
# Short requests for which an engine should have room. Batches of fewer rows leave much of a GPU's throughput
# unused: docs/explanation/parallel.md, "Speed of two ranks".
ENOUGH = 256


def flags(ranks: int, engines: int) -> str:
    names = (("tensor-parallel-size", ranks), ("data-parallel-size", engines))
    return " ".join(f"--{name} {number}" for name, number in names if number > 1) or "one engine"


@dataclass(frozen=True, slots=True)
class Way:
    """Engines of ``ranks`` ranks each. If they do not fit, ``resolved`` is None and ``why_not`` says why."""

    ranks: int
    engines: int
    part: ModelConfig  # one rank's share of the model
    weights: int  # bytes in each rank, before the settings are resolved
    resolved: Resolved | None
    why_not: str = ""

    @property
    def flags(self) -> str:
        return flags(self.ranks, self.engines)

    @property
    def tokens(self) -> int:
        """Tokens of context for which an engine has KV blocks."""
        return self.resolved.geometry.tokens_in(self.resolved.limits.num_blocks) if self.resolved else 0

    @property
    def longest(self) -> int:
        return self.resolved.limits.max_model_len if self.resolved else 0

    def requests(self, length: int) -> int:
        """Returns how many requests of a length an engine runs at once."""
        if self.resolved is None:
            return 0
        limits, blocks = self.resolved.limits, self.resolved.geometry.blocks_for(min(length, self.longest))
        return min(limits.num_blocks // blocks, limits.max_num_seqs)

    def is_ample(self, length: int) -> bool:
        """Returns whether an engine has room for requests of this length, and for ``ENOUGH`` short ones."""
        if self.resolved is None or self.resolved.is_lean:
            return False
        enough = min(ENOUGH, self.resolved.limits.max_num_seqs)
        return self.longest >= length and self.requests(SHORT) >= enough


def ways(
    config: EngineConfig,
    model: ModelConfig,
    gpu: GpuModel,
    count: int,
    *,
    ranks: int | None,
    engines: int | None,
) -> list[Way]:
    """Returns the ways to use ``count`` GPUs, fewest ranks first; ``ranks`` and ``engines`` restrict them.

    Raises ``ConfigError`` if ``ranks`` times ``engines`` exceeds ``count``, or for invalid settings.
    """
    _check_count(gpu, count, ranks or 1, engines or 1)
    check_model(replace(config, tensor_parallel_size=ranks or 1), model)
    found = []
    for size in VALID_SIZES if ranks is None else (ranks,):
        own = replace(config, tensor_parallel_size=size)
        with suppress(ConfigError):
            share_of_first(own, model)  # raises if the model does not allow this size
            if size * (engines or 1) <= count:
                found.append(make_way(own, model, hardware_of(gpu), engines or count // size))
    return found


def _check_count(gpu: GpuModel, count: int, ranks: int, engines: int) -> None:
    if ranks * engines > count:
        name = f"{count}x{gpu.name.lower()}"
        raise ConfigError(f"--gpu {name}: {flags(ranks, engines)} needs {ranks * engines} GPUs, not {count}")


def make_way(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    engines: int,
    precision: Precision | None = None,
) -> Way:
    """``precision``: that of the CPU's kernels; None: other kernels are used."""
    ranks, has_graphs = config.tensor_parallel_size, hardware.kind in ("cuda", "rocm")
    try:
        part = share_of_first(config, model)
    except ConfigError:  # which ``resolve`` raises too
        part = model
    weights = weight_bytes(part, "bfloat16", decoded=hardware.decodes_experts, int8=precision == "int8")
    try:
        resolved = resolve(
            config, model, hardware, can_overlap=has_graphs, can_capture=has_graphs,
            supports_fp8_kv=precision is None, precision=precision,
        )  # fmt: skip
    except ConfigError as error:
        over = weights - hardware.free_bytes
        text = f"the weights exceed the free memory by {gib(over)}" if over > 0 else error.message
        return Way(ranks, engines, part, weights, None, text)
    return Way(ranks, engines, part, weights, resolved)


def remedy(config: EngineConfig, model: ModelConfig, weights: int, hardware: Hardware) -> str:
    """Returns advice if the weights exceed the free memory, else "": close other programs, or use another
    GPU."""
    ways: list[str] = []
    if weights <= hardware.free_bytes:
        return ""
    if weights < hardware.total_bytes - hardware.total_bytes // 10:
        ways.append(
            f"close other programs: this machine has {gib(hardware.total_bytes)}, which would be enough"
        )
    alone = replace(config, device="auto", tensor_parallel_size=1, enable_expert_parallel=None)
    gpus = [(gpu.name, hardware_of(gpu)) for gpu in MODELS]
    fitting = [
        (each.total_bytes, name)
        for name, each in gpus
        if each.kind == "cuda" and make_way(alone, model, each, 1).resolved is not None
    ]
    if fitting:
        names = ", ".join(name for _, name in sorted(fitting)[:3])
        ways.append(f"use a GPU that holds it, such as {names} (chorale fit --gpu NAME)")
    return "; or ".join(ways)


def recommended(found: Sequence[Way], length: int) -> tuple[Way, str] | None:
    """Returns the recommended way and the reason, or None if nothing fits. ``length``: tokens of a request.

    It has as few ranks as an engine needs for its context. Engines share nothing, so with many requests their
    throughput adds up; ranks wait for each other in every layer. With few requests, more ranks can be faster
    (one stream on two GPUs: the 20b is, the 120b is not), but their number is not known here
    (docs/explanation/parallel.md, "Which to choose").
    """
    fitting = [way for way in found if way.resolved is not None]
    enough = min(ENOUGH, *(way.resolved.limits.max_num_seqs for way in fitting
                        if way.resolved and not way.resolved.is_lean), ENOUGH)  # fmt: skip
    ample = [way for way in fitting if way.is_ample(length)]
    capacity = f"{length:,} tokens and {enough} requests of {SHORT:,} tokens"
    if ample:
        way = min(ample, key=lambda each: each.ranks)
        if len(found) == 1:
            return way, f"it has room for {capacity}"
        fewest = "engines of one GPU have" if way.ranks == 1 else f"an engine needs {way.ranks} ranks to have"
        return way, f"{fewest} room for {capacity}; {WHY_ENGINES}"
    if not fitting:
        return None
    if len(found) == 1:
        return fitting[0], f"it fits, with less room than for {capacity}"
    way = max(fitting, key=lambda each: (each.longest, each.engines * each.requests(SHORT), -each.ranks))
    return way, f"its engines have the most room; none of these ways has room for {capacity} in each engine"


WHY_ENGINES = "engines share nothing, and ranks wait for each other in every layer"
HEADING = f"{'ranks':>5} {'engines':>7} {'weights a GPU':>13} {'context an engine':>18} {'longest':>8} " \
    f"{'requests':>11} {'requests':>11} {'upper bound':>11}"  # fmt: skip
HEADINGS = (f"{'full-length':>67} {'2,048-token':>11} {'one stream:':>11}", HEADING)
LEGEND = (
    '"requests": how many fit at once, all engines together; a full-length one has the longest context;',
    '"upper bound": tokens/s that the memory bandwidth allows, without speculative decoding',
)


def table(found: Sequence[Way], gpu: GpuModel, count: int) -> list[str]:
    """Returns the headings, a row for each way, and a legend."""
    rows = [_row(way, gpu) + _idle(count - way.ranks * way.engines) for way in found]
    return [*HEADINGS, *rows, *LEGEND]


def _row(way: Way, gpu: GpuModel) -> str:
    start = f"{way.ranks:>5} {way.engines:>7}"
    if way.resolved is None:
        return f"{start} does not fit: {way.why_not}"
    dtype = way.resolved.dtype
    most = "-"
    if gpu.bandwidth is not None:
        read = token_bytes(way.part, dtype, compact=way.resolved.compact)
        most = f"{gpu.bandwidth * 1e12 / read:,.0f}/s"
    long, short = (f"{way.engines * way.requests(length):,}" for length in (way.longest, SHORT))
    weights = gib(weight_bytes(way.part, dtype, decoded=hardware_of(gpu).decodes_experts))
    return f"{start} {weights:>13} {way.tokens:>18,} {way.longest:>8,} {long:>11} {short:>11} {most:>11}"


def _idle(count: int) -> str:
    return f"  ({count} idle)" if count else ""
