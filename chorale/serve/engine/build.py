"""build_engine: builds an engine from an EngineConfig, in timed phases."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from chorale.client.base import EngineInfo
from chorale.config.engine import EngineConfig
from chorale.config.speculative import SpeculativeConfig
from chorale.engine.adapters.queue import AdapterService
from chorale.engine.commands import Command
from chorale.engine.core import EngineCore
from chorale.engine.drafts.head import HeadDrafter
from chorale.engine.drafts.lookup import NgramDrafter, SuffixDrafter
from chorale.engine.engine_state import Drafter
from chorale.engine.types import AdapterRef, GrammarService
from chorale.errors import ChoraleError
from chorale.kernels.triton.precompile.pool import CompilePool
from chorale.machine.facts import version_of
from chorale.machine.hardware import available_memory
from chorale.model.checkpoint import digest_weights
from chorale.model.config import ModelConfig
from chorale.model.hub import resolve_head, resolve_model
from chorale.parallel.services import RankedAdapters
from chorale.runtime.gpu_faults import explained
from chorale.runtime.progress import Progress
from chorale.runtime.sampling.grammar import GrammarCache
from chorale.runtime.sizing.graph_sizes import MOST_DRAFTING_ROWS
from chorale.runtime.sizing.memory import weight_bytes
from chorale.runtime.sizing.offload import check_host_memory
from chorale.runtime.sizing.resolve import check_model, parts_of
from chorale.runtime.warmup.captures import CAPTURE_SECONDS, capture_first, warm_up
from chorale.serve.engine.build_rank import BuiltRank, Phases, build_rank, open_rank
from chorale.serve.engine.device_control import EngineDevice
from chorale.serve.engine.ranks import RankDevice, StartedRanks, start_ranks

logger = logging.getLogger(__name__)
CACHED_TOKENS = 65_536  # most tokens of finished answers that a SuffixDrafter keeps for each cache_salt


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    pool: CompilePool | None = None,
    prefix_secret: bytes = b"",
    on_lost: Callable[[ChoraleError], None] | None = None,
) -> tuple[EngineCore, EngineInfo]:
    """Finds and loads the model, allocates the KV cache and warms up. Raises ``ConfigError``.

    ``pool``: compile processes that were already started; closed by this function. ``prefix_secret``: key
    of the prefix hashes; if it is empty, a random one is drawn. ``on_lost`` is called from another thread
    with the error if a rank process is lost, since the main thread may wait for it forever.

    Phases: "download", "device", "load", "compile" (Triton only), "kv_pool", "warm_up" and "graphs" (CUDA
    graphs only).
    """
    phases = Phases(progress)
    with phases.phase("download", config.model):
        folder = resolve_model(
            config.model, revision=config.revision, download_dir=config.download_dir, progress=phases.report
        )
        model = ModelConfig.load(folder)
        config = with_local_head(config, phases.report)
    check_model(config, model)
    check_host_memory(config, model, available_memory())
    ranks = start_ranks(config, folder, on_lost) if config.tensor_parallel_size > 1 else None
    try:
        with phases.phase("device"):
            device = open_rank(config, model, 0)
            alone = RankDevice(device, device.hardware)
            rank_device = alone if ranks is None else ranks.connect(config, model, device)
        with explained("the engine could not be loaded", device.hardware.label):
            return _build(rank_device, _Start(config, folder, model, phases, pool, prefix_secret, ranks))
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def with_local_head(config: EngineConfig, progress: Progress | None) -> EngineConfig:
    """Downloads the draft head if needed, and returns the configuration with the path of its folder.
    Raises ``ConfigError``."""
    speculation = config.speculative_config
    if speculation is None or not speculation.has_head or speculation.model is None:
        return config
    folder = resolve_head(
        speculation.model,
        revision=speculation.revision,
        download_dir=config.download_dir,
        progress=progress,
    )
    return replace(
        config,
        speculative_config=replace(speculation, model=str(folder), revision=None, shown=speculation.model),
    )


@dataclass(frozen=True, slots=True)
class _Start:
    """The inputs of ``_build``."""

    config: EngineConfig
    folder: Path
    model: ModelConfig
    phases: Phases
    pool: CompilePool | None
    prefix_secret: bytes
    ranks: StartedRanks | None  # rank processes; None if this process is the only rank


def _build(rank_device: RankDevice, start: _Start) -> tuple[EngineCore, EngineInfo]:
    phases, pool, ranks = start.phases, start.pool, start.ranks
    grammars = GrammarCache(start.model.vocab_size)
    found = build_rank(start.config, start.folder, start.model, rank_device, grammars, phases, pool)
    executor = found.executor
    service: GrammarService = grammars
    adapters: AdapterService | None = found.adapters
    if ranks is not None:
        service = ranks.join(executor, grammars)
        adapters = None if adapters is None else RankedAdapters(adapters, ranks.processes)
    with phases.phase("warm_up"):
        warm_up(executor, found.resolved)
    precompiler = found.precompiler
    if found.resolved.graph_rows:
        with phases.phase("graphs"):
            is_busy = precompiler is not None and precompiler.is_busy  # a capture would wait for kernels
            capture_first(executor, found.resolved, phases.report, 0 if is_busy else CAPTURE_SECONDS)
    if precompiler is not None:
        precompiler.throttle()
        logger.debug(
            "%d kernels, %d of them not recorded by the dry run",
            precompiler.num_kernels,
            precompiler.num_late,
        )
    if pool is not None and (precompiler is None or not precompiler.is_busy):
        pool.close()
    core = EngineCore(
        found.resolved.limits,
        executor,
        grammars=service,
        prefix_secret=start.prefix_secret,
        drafter=make_drafter(start.config.speculative_config),
        device=EngineDevice(start.config, executor, found.resolved),
        adapters=adapters,
    )
    for number, module in enumerate(start.config.lora_modules, 1):
        adapter = AdapterRef(number, module.name, module.path)
        core.control(Command(action="load_adapter", adapter=adapter)).result()
    phases.end()
    return core, _info(start, found, rank_device)


def make_drafter(config: SpeculativeConfig | None) -> Drafter | None:
    """Returns a drafter for the speculation method of ``config``, or None without speculation."""
    if config is None:
        return None
    if config.method == "ngram":
        return NgramDrafter(config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixDrafter(
            config.num_speculative_tokens,
            most=config.suffix_decoding_max_tree_depth,
            factor=config.suffix_decoding_max_spec_factor,
            capacity=CACHED_TOKENS if config.suffix_decoding_max_cached_requests else 0,
        )
    return HeadDrafter(config.num_speculative_tokens, MOST_DRAFTING_ROWS)


def _fingerprint(
    config: EngineConfig,
    weights: bytes,
    found: BuiltRank,
    rank_device: RankDevice,
    sampling: dict[str, float],
) -> str:
    """Returns a hash of the weights, torch, the device, the number formats and the sampling defaults.

    Drafts and limits are left out because they change no answer; Chorale's version and the number of ranks
    because the server shows them.
    """
    resolved = found.resolved
    facts = [
        *(version_of("torch"), version_of("triton"), rank_device.hardware.name),
        *(resolved.dtype, resolved.kv_dtype, str(found.model.ops), resolved.int8),
        *(config.moe_activation_dtype, config.enable_expert_parallel, sorted(sampling.items())),
    ]
    return hashlib.sha256(weights + repr(facts).encode()).hexdigest()[:8]


def _info(start: _Start, found: BuiltRank, rank_device: RankDevice) -> EngineInfo:
    config, model = start.config, start.model
    resolved, limits = found.resolved, found.resolved.limits
    parts, digest = parts_of(config, model), digest_weights(start.folder)
    sampling = dict(model.default_sampling) if config.generation_config == "auto" else {}
    sampling |= config.override_generation_config or {}
    return EngineInfo(
        model=config.model,
        revision=config.revision,
        fingerprint=_fingerprint(config, digest, found, rank_device, sampling),
        model_hash=digest.hex(),
        batch_invariant=config.batch_invariant,
        engine_id=uuid.uuid4().hex[:16],
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        num_kv_tokens=resolved.geometry.tokens_in(limits.num_blocks),
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        num_host_pages=limits.num_host_slots,
        host_kv_bytes=limits.num_host_slots * limits.page_bytes,
        device=rank_device.hardware.name,
        tensor_parallel_size=config.tensor_parallel_size,
        exchange=found.exchange,
        rank_free_bytes=rank_device.free_of_ranks,
        rank_bytes={
            "weights": tuple(
                weight_bytes(
                    part, resolved.dtype, decoded=rank_device.hardware.decodes_experts, int8=resolved.int8
                )
                for part in parts
            ),
            "kv_cache": (limits.num_blocks * resolved.geometry.bytes_per_block,) * len(parts),
        },
        rank_links="" if start.ranks is None else start.ranks.links(),
        dtype=resolved.dtype,
        kv_cache_dtype=resolved.kv_dtype,
        ops=str(found.model.ops),
        parameters=found.model.weights.num_parameters,
        enable_prefix_caching=limits.enable_prefix_caching,
        speculation="" if config.speculative_config is None else str(config.speculative_config),
        num_speculative_tokens=resolved.most_drafts,
        synthetic_acceptance=bool(config.speculative_config and config.speculative_config.is_synthetic),
        enable_sleep_mode=config.enable_sleep_mode,
        max_loras=limits.max_loras,
        has_profiler=config.profiler_config is not None,
        weight_transfer=""
        if config.weight_transfer_config is None
        else config.weight_transfer_config.backend,
        logprobs_mode=resolved.logprobs_mode,
        max_logprobs=resolved.max_logprobs,
        routed_experts=limits.routed_experts,
        default_sampling=sampling,
        notes=resolved.notes,
        startup_seconds=start.phases.seconds,
    )
