"""resolve: chooses values for the options that are not set, from model and machine, each with its reason.

All defaults are decided here. Torch-free.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from chorale.config.cache_dtype import E4M3, cache_dtype
from chorale.config.engine import EngineConfig, LogprobsMode, check_ranks, check_sizes
from chorale.config.sampling_fields import MAX_LOGPROBS
from chorale.engine.types import EngineLimits
from chorale.errors import ConfigError
from chorale.harmony.vocab import VOCAB_SIZE
from chorale.machine.hardware import Hardware, cpu_count
from chorale.machine.platforms import PLATFORMS
from chorale.model.config import ModelConfig
from chorale.parallel.shares import cuts_by_expert, shares_of
from chorale.runtime.sizing.drafts import DraftMemory, draft_memory
from chorale.runtime.sizing.economy import (
    ECONOMIES,
    EMBEDDING,
    USUAL,
    Economy,
    has_host_embedding,
    lean_bytes,
)
from chorale.runtime.sizing.graph_sizes import (
    MIXED_ROWS,
    MIXED_TOKENS,
    MOST_DRAFTING_ROWS,
    chosen_sizes,
    context_sizes,
    row_sizes,
)
from chorale.runtime.sizing.kv_pool import (
    LITTLE_CONTEXT,
    PoolRequest,
    PoolSize,
    check_one_fits,
    check_rows,
    size_pool,
    who_holds,
)
from chorale.runtime.sizing.memory import (
    CUDA_RESERVE,
    SMALL_PARAMETERS,
    KvGeometry,
    activation_bytes,
    adapter_bytes,
    addend_bytes,
    embedding_bytes,
    gib,
    graph_bytes,
    kv_geometry,
    processor_bytes,
    rank_bytes,
    slot_bytes,
    weight_bytes,
)
from chorale.runtime.sizing.offload import GPU_LEAST_HIT, HostTierSizes, host_tier_sizes

# Seconds that prompts may add to a step of running streams. No stream should wait 0.5 s for another's prompt,
# and on a busy CPU steps take several times the expected time.
CPU_PROMPT_DELAY = 0.1
# The same: about 1,000 tokens of 20b on an H200; a step of a hundred streams then takes less than 20 ms
# (benchmarks/engine/step_policy.py, a simulation; measured: docs/lab/kernels.md).
GPU_PROMPT_DELAY = 0.012
# Seconds of a step with batch work, for which a new request waits; the second value applies after a while
# without requests (benchmarks/engine/step_policy.py --batch-delays).
CPU_BATCH_DELAYS = (0.01, 0.04)
GPU_BATCH_DELAYS = (0.004, 0.03)
GPU_LEAST_CHUNK = 1024  # tokens: fewer save little, because all experts are read and all kernels launched
MAX_PROMPT_DELAY = 0.25  # with many waiting prompts or slow steps; a GPU's whole token budget takes less
_SHORT = "little device memory"  # the reason of smaller defaults

Number = TypeVar("Number", int, float, str)


@dataclass(frozen=True, slots=True)
class Decision:
    """One resolved setting. ``chosen`` is False if the operator set the value."""

    name: str
    value: float | str | bool
    reason: str
    chosen: bool = True

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The resolved settings. ``notes``: one line for each setting that is lower than requested or usual."""

    limits: EngineLimits
    dtype: str
    kv_dtype: str
    geometry: KvGeometry
    graph_rows: tuple[int, ...]  # rows of captured decode steps; empty: no captures
    mixed_graphs: bool  # small mixed steps are captured too
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]
    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: LogprobsMode = "raw_logprobs"
    batch_invariant: bool = False
    most_drafts: int = 0  # maximum draft tokens per row and step
    drafts: DraftMemory | None = None  # memory of the draft head; None: no head
    host_tier: HostTierSizes | None = None  # the host memory tier; None: no tier
    int8: bool = False  # dense weights are rounded to 8 bits
    host_embedding: bool = False  # the input embedding stays in host memory, and kernels read it there
    is_lean: bool = False  # sizes for a GPU with little memory
    workspace: int = 0  # bytes beside weights and KV pool: steps, graphs, libraries
    is_roomy: bool = True  # the KV pool has room for a long request
    missing: int = 0  # bytes by which weights and a requested pool exceed a CPU's free memory

    @property
    def has_head(self) -> bool:
        """Returns whether a head on the device makes the drafts."""
        return self.drafts is not None


class _Decider:
    """Collects decisions; keeps values that the operator set."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        if text:
            self.notes.append(text)

    def pick(self, name: str, asked: Number | None, default: Number, reason: str) -> Number:
        value = default if asked is None else asked
        self.decisions.append(Decision(name, value, reason if asked is None else "requested", asked is None))
        return value

    def name(self, name: str, asked: str, default: str, reason: str) -> str:
        return self.pick(name, None if asked == "auto" else asked, default, reason)


@dataclass(frozen=True, slots=True)
class _StepSizes:
    """The limits of a step that do not depend on memory."""

    block_size: int
    seqs: int
    tokens: int
    delay: float


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    *,
    can_overlap: bool = False,
    can_capture: bool = False,
    supports_fp8_kv: bool = True,
    precision: Literal["int8", "exact"] | None = None,
) -> Resolved:
    """Resolve all settings. Raises ``ConfigError`` for settings that cannot run, with computed alternatives.

    ``hardware`` is one rank's. ``can_capture``: device and ops support CUDA graphs. ``supports_fp8_kv``: the
    ops support an fp8 KV cache. ``precision``: precision of the CPU ops; None: other ops are used.
    """
    check_model(config, model)
    attempt = partial(_resolve, config, model, hardware, can_overlap, can_capture, supports_fp8_kv, precision)
    economies = ECONOMIES if can_capture and hardware.kind in ("cuda", "rocm") else (USUAL,)
    for economy in economies[:-1]:
        with suppress(ConfigError):  # one that has another reason than memory comes again below
            found = attempt(economy)
            if found.is_roomy:
                return found
    return attempt(economies[-1])


def _resolve(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    can_overlap: bool,
    can_capture: bool,
    supports_fp8_kv: bool,
    precision: Literal["int8", "exact"] | None,
    economy: Economy,
) -> Resolved:
    """``resolve`` with the defaults of one economy."""
    speculation = config.speculative_config
    part = share_of_first(config, model)  # all ranks use the sizes of the largest share
    decide = _Decider()
    dtype = _dtype(config, model, hardware, decide)
    _note_ranks_and_platform(config, model, hardware, decide)
    pages = ("float32", "--cpu-precision exact") if precision == "exact" else (dtype, "same as dtype")
    kv_dtype = _kv_dtype(config, decide, pages, supports_fp8_kv and not hardware.decodes_experts)
    step = _step_sizes(config, model, hardware, decide, economy)
    drafts = draft_memory(
        speculation,
        model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=step.block_size,
        num_tokens=step.tokens,
        num_rows=MOST_DRAFTING_ROWS,
    )
    decide.note(drafts.note)
    geometry = kv_geometry(part, step.block_size, kv_dtype, drafts.per_block)
    host_tier = _host_tier(config, decide, geometry, step.tokens)
    graph_rows = _graph_rows(config, decide, step.seqs, can_capture)
    mixed_graphs = bool(graph_rows) and config.mixed_cuda_graphs and not economy.is_lean
    if graph_rows and not mixed_graphs:
        decide.pick("mixed_cuda_graphs", None if config.mixed_cuda_graphs else False, False, _SHORT)
    host_embedding = _host_embedding(config, model, hardware, dtype, decide, economy, can_capture)
    fixed = weight_bytes(part, dtype, decoded=hardware.decodes_experts, int8=precision == "int8")
    if config.enable_lora:
        fixed += _adapters(config, part, dtype, decide, on_cpu=hardware.kind == "cpu")
        fixed += 0 if hardware.kind == "cpu" else addend_bytes(part, step.tokens, dtype)
    fixed += drafts.weights + drafts.activations - (embedding_bytes(part, dtype) if host_embedding else 0)
    if host_tier is not None:
        fixed += host_tier.device_bytes + (host_tier.host_bytes if hardware.kind == "cpu" else 0)
    workspace = _workspace(config, model, part, hardware, step, graph_rows, dtype, economy)
    wanted = config.max_model_len or model.max_position_embeddings
    least = workspace // 2 if economy is USUAL else 0  # a smaller pool is better served by smaller steps
    request = PoolRequest(geometry, step.seqs, wanted, fixed + workspace, least)
    longest, size = _pool(config, model, hardware, decide, kv_dtype, request)
    async_scheduling = _async_scheduling(config, decide, can_overlap)
    return Resolved(
        limits=_limits(config, model, hardware, step, size.num_blocks, longest, async_scheduling, host_tier),
        dtype=dtype,
        kv_dtype=kv_dtype,
        geometry=geometry,
        graph_rows=graph_rows,
        mixed_graphs=mixed_graphs,
        decisions=tuple(decide.decisions),
        max_logprobs=_max_logprobs(config, decide),
        logprobs_mode=config.logprobs_mode,
        batch_invariant=config.batch_invariant,
        most_drafts=0 if speculation is None else speculation.num_speculative_tokens,
        drafts=drafts if speculation is not None and speculation.has_head else None,
        notes=tuple(decide.notes),
        host_tier=host_tier,
        int8=precision == "int8",
        missing=size.missing,
        host_embedding=host_embedding,
        is_lean=economy.is_lean,
        workspace=workspace,
        is_roomy=size.is_roomy,
    )


def _adapters(config: EngineConfig, part: ModelConfig, dtype: str, decide: _Decider, *, on_cpu: bool) -> int:
    """Returns the bytes of adapters: in the slots, and on a CPU those of attention in host memory."""
    size = partial(adapter_bytes, part, config.max_lora_rank)
    slots, num_host = config.max_loras, config.max_cpu_loras or config.max_loras
    device = slots * (size("float32") if on_cpu else slot_bytes(part, config.max_lora_rank, dtype))
    host, most = (num_host * size("float32", experts=experts) for experts in (False, True))
    why = f"{gib(host)} of host memory, or {gib(most)} if they have all experts"
    decide.decisions.append(Decision("max_loras", slots, f"{gib(device)} of memory"))
    decide.decisions.append(Decision("max_cpu_loras", num_host, why))
    return device + (host if on_cpu else 0)


def _dtype(config: EngineConfig, model: ModelConfig, hardware: Hardware, decide: _Decider) -> str:
    is_small = hardware.kind == "cpu" and model.num_parameters <= SMALL_PARAMETERS
    why = "a small checkpoint on a CPU" if is_small else "the checkpoint's own precision"
    dtype = decide.name("dtype", config.dtype, "float32" if is_small else "bfloat16", why)
    if model.expert_input_scales and config.moe_activation_dtype != "fp8":
        decide.note(
            f"the checkpoint's e4m3 scales of the experts' inputs are not used, inputs are {dtype}: "
            "--moe-activation-dtype fp8 (Hopper) uses them"
        )
    return dtype


def _note_ranks_and_platform(
    config: EngineConfig, model: ModelConfig, hardware: Hardware, decide: _Decider
) -> None:
    if config.tensor_parallel_size > 1:
        asked, by_expert = config.enable_expert_parallel, cuts_by_expert(config)
        why = "by default each rank has columns of every expert"
        decide.pick("enable_expert_parallel", asked, by_expert, why)
        if by_expert and len(set(model.layer_experts)) > 1:
            raise ConfigError(
                "--enable-expert-parallel: the model's layers have different numbers of experts, so their "
                "experts cannot be shared out; without the flag, each rank has columns of every expert"
            )
    if hardware.kind in PLATFORMS:
        decide.note(PLATFORMS[hardware.kind].state)


def _step_sizes(
    config: EngineConfig, model: ModelConfig, hardware: Hardware, decide: _Decider, economy: Economy
) -> _StepSizes:
    cpu, default = hardware.kind == "cpu", f"default on {hardware.kind}"
    seqs = (64 if model.num_parameters <= SMALL_PARAMETERS else 16) if cpu else economy.seqs
    tokens = 2048 if cpu or hardware.decodes_experts else economy.tokens
    few = default if economy is USUAL else _SHORT
    delay = CPU_PROMPT_DELAY if cpu else GPU_PROMPT_DELAY
    step = _StepSizes(
        decide.pick("block_size", config.block_size, 16 if cpu else 64, default),
        decide.pick("max_num_seqs", config.max_num_seqs, seqs, few),
        decide.pick("max_num_batched_tokens", config.max_num_batched_tokens, tokens, few),
        decide.pick("prompt_delay", config.prompt_delay, delay, default),
    )
    longest = config.max_model_len or model.max_position_embeddings
    check_rows(step.seqs, longest, step.block_size, hardware)
    return step


def _host_embedding(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    dtype: str,
    decide: _Decider,
    economy: Economy,
    can_gather: bool,
) -> bool:
    """Returns whether the input embedding stays in host memory, beside a device with memory of its own."""
    found = hardware.kind != "cpu" and has_host_embedding(config, economy, can_gather=can_gather)
    if found:
        size = gib(embedding_bytes(model, dtype))
        asked = None if config.cpu_offload_params is None else EMBEDDING
        decide.pick("cpu_offload_params", asked, EMBEDDING, f"{_SHORT}; {size} stay in host memory")
    if economy is not USUAL:
        where = "the input embedding stays in host memory, and " if found and asked is None else ""
        decide.note(f"{_SHORT}: {where}steps are smaller (see max_num_seqs and max_num_batched_tokens)")
    return found


def _workspace(
    config: EngineConfig,
    model: ModelConfig,
    part: ModelConfig,
    hardware: Hardware,
    step: _StepSizes,
    graph_rows: tuple[int, ...],
    dtype: str,
    economy: Economy,
) -> int:
    """Return the bytes that a device needs in addition to weights and the pool."""
    steps = activation_bytes(part, step.tokens, step.seqs, dtype)
    if hardware.kind == "cpu":
        return steps
    most = max(step.tokens, step.seqs, *graph_rows)
    ranks = rank_bytes(config, model, most, dtype, has_peers=hardware.kind == "cuda")
    longest = config.max_model_len or model.max_position_embeddings
    if economy.is_lean:
        blocks = -(-longest // step.block_size) + 1
        return ranks + lean_bytes(config, part, step.tokens, step.seqs, graph_rows, blocks)
    return (
        steps
        + CUDA_RESERVE
        + _graph_bytes(config, part, graph_rows, step.block_size)
        + processor_bytes(model, step.seqs)
        + ranks
    )


def _limits(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    step: _StepSizes,
    num_blocks: int,
    longest: int,
    async_scheduling: bool,
    host_tier: HostTierSizes | None,
) -> EngineLimits:
    cpu, speculation = hardware.kind == "cpu", config.speculative_config
    _check_step(config, step, longest)
    batch_delay, long_batch_delay = CPU_BATCH_DELAYS if cpu else GPU_BATCH_DELAYS
    return EngineLimits(
        num_blocks=num_blocks,
        block_size=step.block_size,
        max_num_seqs=step.seqs,
        max_num_active_seqs=config.max_num_active_seqs or 0,
        max_num_batched_tokens=min(step.tokens, config.max_num_scheduled_tokens or step.tokens),
        prefill_interval=config.prefill_schedule_interval,
        long_prefill=config.long_prefill_token_threshold,
        long_prefill_share=config.long_prefill_token_threshold_adaptive,
        observed_blocks=config.kv_cache_metrics_sample if config.kv_cache_metrics else 0.0,
        watermark=0.01 if config.watermark is None else config.watermark,
        prompt_delay=step.delay,
        max_prompt_delay=MAX_PROMPT_DELAY,
        batch_delay=batch_delay,
        long_batch_delay=long_batch_delay,
        batch_waits=cpu,
        least_chunk=1 if cpu else GPU_LEAST_CHUNK,
        max_model_len=longest,
        sliding_window=model.sliding_window,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
        async_scheduling=async_scheduling,
        eos_token_ids=tuple(token for token in model.eos_token_ids if token < model.vocab_size),
        vocab_size=model.vocab_size,
        seed=config.seed,
        draft_tokens=() if speculation is None else speculation.tokens_by_rows,
        routed_experts=_routed_experts(config, model),
        max_loras=config.max_loras if config.enable_lora else 0,
        **_tier_limits(host_tier, config.tensor_parallel_size, 1 if cpu else GPU_LEAST_HIT),
    )


def _check_step(config: EngineConfig, step: _StepSizes, longest: int) -> None:
    """Raises ``ConfigError`` for limits of the scheduler that exceed the sizes that they limit."""
    active, threshold = config.max_num_active_seqs, config.long_prefill_token_threshold
    if active is not None and active > step.seqs:
        raise ConfigError(f"--max-num-active-seqs {active} is more than --max-num-seqs {step.seqs}")
    if threshold > longest:
        raise ConfigError(
            f"--long-prefill-token-threshold {threshold} is more than --max-model-len {longest}"
        )


def _routed_experts(config: EngineConfig, model: ModelConfig) -> tuple[int, int] | None:
    if not config.enable_return_routed_experts:
        return None
    if model.num_local_experts > 256:
        raise ConfigError("--enable-return-routed-experts: the model has more than 256 experts")
    return model.num_hidden_layers, model.num_experts_per_tok


def _host_tier(
    config: EngineConfig, decide: _Decider, geometry: KvGeometry, tokens: int
) -> HostTierSizes | None:
    """Return the sizes of the host memory tier, or None if it is not requested or useless."""
    sizes = host_tier_sizes(config, geometry, tokens)
    if sizes is not None:
        beside = f"{sizes}; {gib(sizes.device_bytes)} of device memory for copies"
        decide.decisions.append(Decision("kv_offloading_size", config.kv_offloading_size or 0, beside, False))
    elif config.kv_offloading_size:
        decide.notes.append("--kv-offloading-size has no effect without prefix caching")
    return sizes


def _tier_limits(sizes: HostTierSizes | None, ranks: int, least_hit: int) -> dict[str, int]:
    """Return the fields of ``EngineLimits`` about host memory."""
    if sizes is None:
        return {}
    return {
        "num_host_slots": sizes.num_slots,
        "max_saved_pages": sizes.saved,
        "min_host_hit": least_hit,
        "page_bytes": sizes.page_bytes * ranks,
    }


def _graph_rows(config: EngineConfig, decide: _Decider, seqs: int, can_capture: bool) -> tuple[int, ...]:
    """Return the rows of captured decode steps. A batch with more rows than the last runs without a graph."""
    asked = config.cudagraph_capture_sizes
    most = min(seqs, seqs if config.max_cudagraph_capture_size is None else config.max_cudagraph_capture_size)
    sizes: tuple[int, ...] = ()
    if config.enforce_eager or most < 1:
        why = "requested"
    elif not can_capture:
        why = "not supported by the device or its ops"
    elif asked is not None:
        why, sizes = "requested", chosen_sizes(asked, most)
    else:
        why, sizes = "decode steps, captured when first needed", row_sizes(most)
    text = f"{len(sizes)} sizes up to {sizes[-1]} rows" if sizes else "none"
    decide.decisions.append(Decision("cuda_graphs", text, why, why != "requested"))
    return sizes


def _graph_bytes(config: EngineConfig, model: ModelConfig, sizes: tuple[int, ...], block_size: int) -> int:
    longest = config.max_model_len or model.max_position_embeddings
    num_graphs = 2 * sum(len(context_sizes(size, longest)) for size in sizes)  # with and without filters
    mixed = MIXED_TOKENS if config.mixed_cuda_graphs else ()
    num_graphs += len(mixed) * len(MIXED_ROWS)
    if config.enable_lora:
        num_graphs += 2 * (len(sizes) + len(mixed))
    most = max((*sizes, *mixed), default=0) if sizes else 0
    return graph_bytes(model, most, num_graphs, -(-longest // block_size) + 1)


def cpu_precision(config: EngineConfig, model: ModelConfig) -> Literal["int8", "exact"]:
    """Return the precision of the CPU ops. Rounding saves little if the weights fit into the cache."""
    if config.cpu_precision != "auto":
        return config.cpu_precision
    return "exact" if model.num_parameters <= SMALL_PARAMETERS else "int8"


def _kv_dtype(config: EngineConfig, decide: _Decider, default: tuple[str, str], supports_fp8_kv: bool) -> str:
    """Return the KV type. ``default``: the default type and its reason."""
    asked = cache_dtype(config.kv_cache_dtype)
    if asked == E4M3 and not supports_fp8_kv:
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: this op back end does not support an fp8 KV cache"
        )
    return decide.name("kv_cache_dtype", asked, *default)


def _pool(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    decide: _Decider,
    kv_dtype: str,
    request: PoolRequest,
) -> tuple[int, PoolSize]:
    """Return max_model_len and the size. The model's maximum is reduced to the pool's capacity; a requested
    length is not."""
    wanted, geometry = request.max_model_len, request.geometry
    size = size_pool(config, hardware, request)
    if size.is_shared and (others := who_holds(hardware)):
        decide.notes.append(f"{others}; the KV cache gets the rest ({size.num_blocks} blocks)")
    fits = geometry.tokens_in(size.num_blocks)
    asked = config.max_model_len
    if asked is None and 2 <= fits < wanted:
        decide.notes.append(
            f"max_model_len is {fits} instead of the model's {wanted}: the KV pool holds no more "
            f"({size.num_blocks} blocks of {geometry.block_size} tokens, {size.reason})"
        )
        if fits < LITTLE_CONTEXT:
            decide.note(f"{fits:,} tokens of context are enough for a short chat only; free some memory")
        decide.pick("max_model_len", None, fits, "limited by the KV pool")
        wanted = fits
    else:
        check_one_fits(config, size, request, kv_dtype, hardware)
        decide.pick("max_model_len", asked, wanted, "the model's maximum")
    memory = gib(size.num_blocks * geometry.bytes_per_block)
    decide.pick("num_blocks", config.num_gpu_blocks_override, size.num_blocks, f"{memory}, {size.reason}")
    if size.missing:
        decide.notes.append(
            f"weights, activations and KV pool exceed the free memory by {gib(size.missing)}: {size.reason}"
        )
    return wanted, size


def _async_scheduling(config: EngineConfig, decide: _Decider, can_overlap: bool) -> bool:
    reason = "the device works while the host plans" if can_overlap else "host and device are the same"
    return bool(decide.pick("async_scheduling", config.async_scheduling, can_overlap, reason))


def _max_logprobs(config: EngineConfig, decide: _Decider) -> int:
    """Resolve max_logprobs; -1 means the maximum, as in vLLM."""
    if 0 <= config.max_logprobs <= MAX_LOGPROBS:
        return config.max_logprobs
    decide.notes.append(
        f"max_logprobs is {MAX_LOGPROBS} instead of {config.max_logprobs}: {MAX_LOGPROBS} is the maximum"
    )
    return MAX_LOGPROBS


def share_of_first(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the sizes of rank 0's part of the model, which is the largest. Raises like ``parts_of``."""
    return parts_of(config, model)[0]


def parts_of(config: EngineConfig, model: ModelConfig) -> tuple[ModelConfig, ...]:
    """Return the sizes of each rank's part of the model. Raises ``ConfigError`` if it cannot be cut."""
    if config.tensor_parallel_size == 1:
        return (model,)
    return tuple(model.part(share) for share in shares_of(config, model))


def check_model(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ``ConfigError`` for settings that no machine can run or this version does not support."""
    check_ranks(config)
    check_sizes(config)
    share_of_first(config, model)
    if model.vocab_size > VOCAB_SIZE:
        raise ConfigError(
            f"config.json: vocab_size: {model.vocab_size} is more than harmony's {VOCAB_SIZE} tokens"
        )
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the model's maximum of "
            f"{model.max_position_embeddings}"
        )


def default_threads(num_parameters: int, host_share: int = 1) -> int:
    """Default number of CPU threads: all cores for a large model, all but one for a small one.

    A small model's steps take milliseconds, and each parallel section waits for its slowest thread: with the
    HTTP processes on the same two cores, a 256-wide step took 140 ms on two threads and 17 ms on one.
    ``host_share``: number of engines that share the cores.
    """
    cores = cpu_count()
    return max(1, (cores if num_parameters > SMALL_PARAMETERS else cores - 1) // host_share)
