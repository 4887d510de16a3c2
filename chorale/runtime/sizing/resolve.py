"""resolve: chooses values for the options that are not set, from model and machine, each with its reason.

All defaults are decided here. Torch-free.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
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
    compact_bytes,
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
# Largest part of the memory beside the weights that a smaller copy of dense weights may take. It takes 2 % of
# an H200's, and would take a sixth of what 120b leaves of an 80 GB GPU.
COMPACT_SHARE = 0.05
_SHORT = "little device memory"  # the reason of smaller defaults

Number = TypeVar("Number", int, float, str)
Precision = Literal["int8", "exact"]  # of the CPU ops


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
    compact: bool = False  # dense weights have a smaller copy for few tokens
    is_lean: bool = False  # sizes for a GPU with little memory
    workspace: int = 0  # bytes beside weights and KV pool: steps, graphs, libraries
    is_roomy: bool = True  # the KV pool has room for a long request
    missing: int = 0  # bytes by which weights and a requested pool exceed a CPU's free memory

    @property
    def has_head(self) -> bool:
        """Returns whether a head on the device makes the drafts."""
        return self.drafts is not None


class _Resolver:
    """``resolve`` with the defaults of one economy. Collects decisions; keeps what the operator set."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, hardware: Hardware, economy: Economy
    ) -> None:
        self.config, self.model, self.hardware, self.economy = config, model, hardware, economy
        self.part = share_of_first(config, model)  # all ranks use the sizes of the largest share
        self.on_cpu = hardware.kind == "cpu"
        self.wanted_len = config.max_model_len or model.max_position_embeddings
        self.decisions: list[Decision] = []
        self.notes: list[str] = []

    def resolve(
        self,
        can_overlap: bool,
        can_capture: bool,
        supports_fp8_kv: bool,
        supports_compact: bool,
        precision: Precision | None,
    ) -> Resolved:
        """Resolve all settings, in the order of their dependencies."""
        config, speculation, int8 = self.config, self.config.speculative_config, precision == "int8"
        self.dtype = self._dtype()
        self._note_ranks_and_platform()
        self.kv_dtype = self._kv_dtype(precision, supports_fp8_kv)
        self._step_sizes()
        drafts = draft_memory(
            speculation, self.model, self.dtype, self.kv_dtype, self.block_size, self.tokens
        )
        self._note(drafts.note)
        self.geometry = kv_geometry(self.part, self.block_size, self.kv_dtype, drafts.per_block)
        host_tier = self._host_tier()
        graph_rows = self._graph_rows(can_capture)
        mixed_graphs = bool(graph_rows) and config.mixed_cuda_graphs and not self.economy.is_lean
        if graph_rows and not mixed_graphs:
            self._pick("mixed_cuda_graphs", None if config.mixed_cuda_graphs else False, False, _SHORT)
        host_embedding = self._host_embedding(can_capture)
        fixed = self._fixed(drafts, host_tier, int8=int8, host_embedding=host_embedding)
        compact = self._compact(fixed) if supports_compact else 0
        fixed += compact
        workspace = self._workspace(graph_rows)
        max_model_len, size = self._pool(fixed, workspace)
        async_scheduling = self._async_scheduling(can_overlap)
        return Resolved(
            limits=self._limits(size.num_blocks, max_model_len, async_scheduling, host_tier),
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            geometry=self.geometry,
            graph_rows=graph_rows,
            mixed_graphs=mixed_graphs,
            decisions=tuple(self.decisions),
            max_logprobs=self._max_logprobs(),
            logprobs_mode=config.logprobs_mode,
            batch_invariant=config.batch_invariant,
            most_drafts=0 if speculation is None else speculation.num_speculative_tokens,
            drafts=drafts if speculation is not None and speculation.has_head else None,
            notes=tuple(self.notes),
            host_tier=host_tier,
            int8=int8,
            missing=size.missing,
            host_embedding=host_embedding,
            compact=compact > 0,
            is_lean=self.economy.is_lean,
            workspace=workspace,
            is_roomy=size.is_roomy,
        )

    # ------------------------------------------------------------------ decisions

    def _note(self, text: str) -> None:
        if text:
            self.notes.append(text)

    def _pick(self, name: str, asked: Number | None, default: Number, reason: str) -> Number:
        value = default if asked is None else asked
        self.decisions.append(Decision(name, value, reason if asked is None else "requested", asked is None))
        return value

    def _name(self, name: str, asked: str, default: str, reason: str) -> str:
        return self._pick(name, None if asked == "auto" else asked, default, reason)

    def _dtype(self) -> str:
        is_small = self.on_cpu and self.model.num_parameters <= SMALL_PARAMETERS
        why = "a small checkpoint on a CPU" if is_small else "the checkpoint's own precision"
        dtype = self._name("dtype", self.config.dtype, "float32" if is_small else "bfloat16", why)
        if self.model.expert_input_scales and self.config.moe_activation_dtype != "fp8":
            self._note(
                f"the checkpoint's e4m3 scales of the experts' inputs are not used, inputs are {dtype}: "
                "--moe-activation-dtype fp8 (Hopper) uses them"
            )
        return dtype

    def _note_ranks_and_platform(self) -> None:
        if self.config.tensor_parallel_size > 1:
            asked, by_expert = self.config.enable_expert_parallel, cuts_by_expert(self.config)
            why = "by default each rank has columns of every expert"
            self._pick("enable_expert_parallel", asked, by_expert, why)
            if by_expert and len(set(self.model.layer_experts)) > 1:
                raise ConfigError(
                    "--enable-expert-parallel: the model's layers have different numbers of experts, so "
                    "their experts cannot be shared out; without the flag, each rank has columns of every "
                    "expert"
                )
        if self.hardware.kind in PLATFORMS:
            self._note(PLATFORMS[self.hardware.kind].state)

    def _kv_dtype(self, precision: Precision | None, supports_fp8_kv: bool) -> str:
        name = self.config.kv_cache_dtype
        asked = cache_dtype(name)
        if asked == E4M3 and (not supports_fp8_kv or self.hardware.decodes_experts):
            raise ConfigError(f"--kv-cache-dtype {name}: this op back end does not support an fp8 KV cache")
        if precision == "exact":
            return self._name("kv_cache_dtype", asked, "float32", "--cpu-precision exact")
        return self._name("kv_cache_dtype", asked, self.dtype, "same as dtype")

    def _step_sizes(self) -> None:
        """Decide on the limits of a step that do not depend on memory."""
        config, cpu, default = self.config, self.on_cpu, f"default on {self.hardware.kind}"
        small_seqs = 64 if self.model.num_parameters <= SMALL_PARAMETERS else 16
        seqs = small_seqs if cpu else self.economy.seqs
        tokens = 2048 if cpu or self.hardware.decodes_experts else self.economy.tokens
        few = default if self.economy is USUAL else _SHORT
        delay = CPU_PROMPT_DELAY if cpu else GPU_PROMPT_DELAY
        self.block_size = self._pick("block_size", config.block_size, 16 if cpu else 64, default)
        self.seqs = self._pick("max_num_seqs", config.max_num_seqs, seqs, few)
        self.tokens = self._pick("max_num_batched_tokens", config.max_num_batched_tokens, tokens, few)
        self.prompt_delay = self._pick("prompt_delay", config.prompt_delay, delay, default)
        check_rows(self.seqs, self.wanted_len, self.block_size, self.hardware)

    def _host_tier(self) -> HostTierSizes | None:
        """Return the sizes of the host memory tier, or None if it is not requested or useless."""
        asked = self.config.kv_offloading_size or 0
        sizes = host_tier_sizes(self.config, self.geometry, self.tokens)
        if sizes is not None:
            beside = f"{sizes}; {gib(sizes.device_bytes)} of device memory for copies"
            self.decisions.append(Decision("kv_offloading_size", asked, beside, False))
        elif asked:
            self._note("--kv-offloading-size has no effect without prefix caching")
        return sizes

    def _graph_rows(self, can_capture: bool) -> tuple[int, ...]:
        """Return the rows of captured decode steps. A batch with more rows than the last runs without a
        graph."""
        asked, highest = self.config.cudagraph_capture_sizes, self.config.max_cudagraph_capture_size
        most = self.seqs if highest is None else min(self.seqs, highest)
        sizes: tuple[int, ...] = ()
        if self.config.enforce_eager or most < 1:
            why = "requested"
        elif not can_capture:
            why = "not supported by the device or its ops"
        elif asked is not None:
            why, sizes = "requested", chosen_sizes(asked, most)
        else:
            why, sizes = "decode steps, captured when first needed", row_sizes(most)
        text = f"{len(sizes)} sizes up to {sizes[-1]} rows" if sizes else "none"
        self.decisions.append(Decision("cuda_graphs", text, why, why != "requested"))
        return sizes

    def _host_embedding(self, can_gather: bool) -> bool:
        """Returns whether the embedding stays in host memory instead of on the GPU."""
        found = not self.on_cpu and has_host_embedding(self.config, self.economy, can_gather=can_gather)
        is_default = self.config.cpu_offload_params is None
        if found:
            size = gib(embedding_bytes(self.model, self.dtype))
            asked = None if is_default else EMBEDDING
            self._pick("cpu_offload_params", asked, EMBEDDING, f"{_SHORT}; {size} stay in host memory")
        if self.economy is not USUAL:
            where = "the input embedding stays in host memory, and " if found and is_default else ""
            self._note(f"{_SHORT}: {where}steps are smaller (see max_num_seqs and max_num_batched_tokens)")
        return found

    def _compact(self, fixed: int) -> int:
        """Return the bytes of a smaller copy of dense weights for few tokens, or 0 if there is none: it may
        take little of the memory that remains. ``fixed``: bytes of everything else that has a fixed size."""
        hardware, config = self.hardware, self.config
        if self.dtype != "bfloat16" or self.model.head_dim != 64 or config.batch_invariant:
            return 0
        usable = min(hardware.free_bytes, int(hardware.total_bytes * config.gpu_memory_utilization))
        size, free = compact_bytes(self.part), usable - fixed
        found = size <= COMPACT_SHARE * free
        why = f"{gib(size)} for 12-bit copies, which steps of few tokens read faster"
        reason = why if found else f"{gib(size)} would be too much of {gib(max(0, free))}"
        self.decisions.append(Decision("compact_weights", found, reason))
        return size if found else 0

    def _async_scheduling(self, can_overlap: bool) -> bool:
        reason = "the device works while the host plans" if can_overlap else "host and device are the same"
        return bool(self._pick("async_scheduling", self.config.async_scheduling, can_overlap, reason))

    def _max_logprobs(self) -> int:
        """Resolve max_logprobs; -1 means the maximum, as in vLLM."""
        asked = self.config.max_logprobs
        if 0 <= asked <= MAX_LOGPROBS:
            return asked
        self._note(f"max_logprobs is {MAX_LOGPROBS} instead of {asked}: {MAX_LOGPROBS} is the maximum")
        return MAX_LOGPROBS

    # ------------------------------------------------------------------ memory

    def _fixed(
        self, drafts: DraftMemory, host_tier: HostTierSizes | None, *, int8: bool, host_embedding: bool
    ) -> int:
        """Return the bytes of weights, adapters, the draft head and the host tier."""
        part, dtype = self.part, self.dtype
        fixed = weight_bytes(part, dtype, decoded=self.hardware.decodes_experts, int8=int8)
        if self.config.enable_lora:
            fixed += self._adapters()
        fixed += drafts.weights + drafts.activations - (embedding_bytes(part, dtype) if host_embedding else 0)
        if host_tier is not None:
            fixed += host_tier.device_bytes + (host_tier.host_bytes if self.on_cpu else 0)
        return fixed

    def _adapters(self) -> int:
        """Returns the bytes of adapters: in the slots, and on a CPU those of attention in host memory."""
        config, part, rank = self.config, self.part, self.config.max_lora_rank
        slots, num_host = config.max_loras, config.max_cpu_loras or config.max_loras
        whole = adapter_bytes(part, rank, "float32")
        attention = adapter_bytes(part, rank, "float32", experts=False)
        device = slots * (whole if self.on_cpu else slot_bytes(part, rank, self.dtype))
        why = (
            f"{gib(num_host * attention)} of host memory, or {gib(num_host * whole)} if they have all experts"
        )
        self.decisions.append(Decision("max_loras", slots, f"{gib(device)} of memory"))
        self.decisions.append(Decision("max_cpu_loras", num_host, why))
        if self.on_cpu:
            return device + num_host * attention
        return device + addend_bytes(part, self.tokens, self.dtype)

    def _workspace(self, graph_rows: tuple[int, ...]) -> int:
        """Return the bytes that a device needs in addition to weights and the pool."""
        config, part, blocks = self.config, self.part, -(-self.wanted_len // self.block_size) + 1
        steps = activation_bytes(part, self.tokens, self.seqs, self.dtype)
        if self.on_cpu:
            return steps
        most = max(self.tokens, self.seqs, *graph_rows)
        ranks = rank_bytes(config, self.model, most, self.dtype, has_peers=self.hardware.kind == "cuda")
        if self.economy.is_lean:
            return ranks + lean_bytes(config, part, self.tokens, self.seqs, graph_rows, blocks)
        graphs = self._graph_bytes(graph_rows, blocks)
        return steps + CUDA_RESERVE + graphs + processor_bytes(self.model, self.seqs) + ranks

    def _graph_bytes(self, sizes: tuple[int, ...], max_blocks: int) -> int:
        num_graphs = 2 * sum(len(context_sizes(size, self.wanted_len)) for size in sizes)  # filters or not
        mixed = MIXED_TOKENS if self.config.mixed_cuda_graphs else ()
        num_graphs += len(mixed) * len(MIXED_ROWS)
        if self.config.enable_lora:
            num_graphs += 2 * (len(sizes) + len(mixed))
        most = max((*sizes, *mixed), default=0) if sizes else 0
        return graph_bytes(self.part, most, num_graphs, max_blocks)

    def _pool(self, fixed: int, workspace: int) -> tuple[int, PoolSize]:
        """Return max_model_len and the pool's size. The model's maximum is reduced to the pool's capacity; a
        requested length is not."""
        config, wanted, geometry = self.config, self.wanted_len, self.geometry
        least = workspace // 2 if self.economy is USUAL else 0  # smaller steps serve a smaller pool better
        request = PoolRequest(geometry, self.seqs, wanted, fixed + workspace, least)
        size = size_pool(config, self.hardware, request)
        if size.is_shared and (others := who_holds(self.hardware)):
            self._note(f"{others}; the KV cache gets the rest ({size.num_blocks} blocks)")
        fits = geometry.tokens_in(size.num_blocks)
        if config.max_model_len is None and 2 <= fits < wanted:
            self._note(
                f"max_model_len is {fits} instead of the model's {wanted}: the KV pool holds no more "
                f"({size.num_blocks} blocks of {geometry.block_size} tokens, {size.reason})"
            )
            if fits < LITTLE_CONTEXT:
                self._note(f"{fits:,} tokens of context are enough for a short chat only; free some memory")
            wanted = self._pick("max_model_len", None, fits, "limited by the KV pool")
        else:
            check_one_fits(config, size, request, self.kv_dtype, self.hardware)
            self._pick("max_model_len", config.max_model_len, wanted, "the model's maximum")
        memory = gib(size.num_blocks * geometry.bytes_per_block)
        self._pick("num_blocks", config.num_gpu_blocks_override, size.num_blocks, f"{memory}, {size.reason}")
        if size.missing:
            exceeded = f"exceed the free memory by {gib(size.missing)}"
            self._note(f"weights, activations and KV pool {exceeded}: {size.reason}")
        return wanted, size

    # ------------------------------------------------------------------ limits of the scheduler

    def _limits(
        self, num_blocks: int, max_model_len: int, async_scheduling: bool, host_tier: HostTierSizes | None
    ) -> EngineLimits:
        config, model, cpu, speculation = self.config, self.model, self.on_cpu, self.config.speculative_config
        self._check_limits(max_model_len)
        batch_delay, long_batch_delay = CPU_BATCH_DELAYS if cpu else GPU_BATCH_DELAYS
        return EngineLimits(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.seqs,
            max_num_active_seqs=config.max_num_active_seqs or 0,
            max_num_batched_tokens=min(self.tokens, config.max_num_scheduled_tokens or self.tokens),
            prefill_interval=config.prefill_schedule_interval,
            long_prefill=config.long_prefill_token_threshold,
            long_prefill_share=config.long_prefill_token_threshold_adaptive,
            observed_blocks=config.kv_cache_metrics_sample if config.kv_cache_metrics else 0.0,
            watermark=0.01 if config.watermark is None else config.watermark,
            prompt_delay=self.prompt_delay,
            max_prompt_delay=MAX_PROMPT_DELAY,
            batch_delay=batch_delay,
            long_batch_delay=long_batch_delay,
            batch_waits=cpu,
            least_chunk=1 if cpu else GPU_LEAST_CHUNK,
            max_model_len=max_model_len,
            sliding_window=model.sliding_window,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,
            async_scheduling=async_scheduling,
            eos_token_ids=tuple(token for token in model.eos_token_ids if token < model.vocab_size),
            vocab_size=model.vocab_size,
            seed=config.seed,
            draft_tokens=() if speculation is None else speculation.tokens_by_rows,
            routed_experts=self._routed_experts(),
            max_loras=config.max_loras if config.enable_lora else 0,
            **self._tier_limits(host_tier),
        )

    def _check_limits(self, max_model_len: int) -> None:
        """Raises ``ConfigError`` for limits of the scheduler that exceed the sizes that they limit."""
        active, threshold = self.config.max_num_active_seqs, self.config.long_prefill_token_threshold
        if active is not None and active > self.seqs:
            raise ConfigError(f"--max-num-active-seqs {active} is more than --max-num-seqs {self.seqs}")
        if threshold > max_model_len:
            raise ConfigError(
                f"--long-prefill-token-threshold {threshold} is more than --max-model-len {max_model_len}"
            )

    def _routed_experts(self) -> tuple[int, int] | None:
        if not self.config.enable_return_routed_experts:
            return None
        if self.model.num_local_experts > 256:
            raise ConfigError("--enable-return-routed-experts: the model has more than 256 experts")
        return self.model.num_hidden_layers, self.model.num_experts_per_tok

    def _tier_limits(self, sizes: HostTierSizes | None) -> dict[str, int]:
        """Return the fields of ``EngineLimits`` about host memory."""
        if sizes is None:
            return {}
        return {
            "num_host_slots": sizes.num_slots,
            "max_saved_pages": sizes.saved,
            "min_host_hit": 1 if self.on_cpu else GPU_LEAST_HIT,
            "page_bytes": sizes.page_bytes * self.config.tensor_parallel_size,
        }


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    *,
    can_overlap: bool = False,
    can_capture: bool = False,
    supports_fp8_kv: bool = True,
    supports_compact: bool = True,
    precision: Precision | None = None,
) -> Resolved:
    """Resolve all settings. Raises ``ConfigError`` for settings that cannot run, with computed alternatives.

    ``hardware`` is one rank's. ``can_capture``: device and ops support CUDA graphs. ``supports_fp8_kv``: the
    ops support an fp8 KV cache. ``supports_compact``: they have ``Ops.pack_compact``. ``precision``:
    precision of the CPU ops; None: other ops are used.
    """
    check_model(config, model)

    def attempt(economy: Economy, has_compact: bool) -> Resolved:
        resolver = _Resolver(config, model, hardware, economy)
        return resolver.resolve(can_overlap, can_capture, supports_fp8_kv, has_compact, precision)

    economies = ECONOMIES if can_capture and hardware.kind in ("cuda", "rocm") else (USUAL,)
    ways = [(each, False) for each in economies]
    if supports_compact and hardware.capability >= 90:
        ways.insert(0, (USUAL, True))
    for economy, has_compact in ways[:-1]:
        with suppress(ConfigError):  # one that has another reason than memory comes again below
            found = attempt(economy, has_compact)
            if found.is_roomy:
                return found
    return attempt(*ways[-1])


def cpu_precision(config: EngineConfig, model: ModelConfig) -> Precision:
    """Return the precision of the CPU ops. Rounding saves little if the weights fit into the cache."""
    if config.cpu_precision != "auto":
        return config.cpu_precision
    return "exact" if model.num_parameters <= SMALL_PARAMETERS else "int8"


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
