"""build_rank: loads and allocates one rank. An engine on a single device has one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from chorale.config.cache_dtype import E4M3
from chorale.config.engine import EngineConfig
from chorale.config.speculative import MOST_DRAFT_TOKENS, SpeculativeConfig
from chorale.errors import ConfigError
from chorale.kernels import select_ops
from chorale.kernels.adapters import SlotSizes
from chorale.kernels.cpu.library import library
from chorale.kernels.ops import Ops, Precision, StepSizes, with_compact
from chorale.kernels.triton.precompile.pool import CompilePool
from chorale.model.checkpoint import with_kv_scales
from chorale.model.config import ModelConfig
from chorale.model.draft.config import published_head
from chorale.model.draft.head import DraftHead
from chorale.model.draft.load import Target as HeadTarget
from chorale.model.draft.load import load_head
from chorale.model.draft.random_head import random_head
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import Target, load_weights
from chorale.parallel.rank import Rank
from chorale.parallel.shares import Share, fixed_sums
from chorale.runtime.adapters import AdapterStore
from chorale.runtime.build_worker import make_worker
from chorale.runtime.device import DTYPES, Device, open_device
from chorale.runtime.drafts.drafting import DraftSetup
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.profiler import TorchProfiler
from chorale.runtime.progress import Progress
from chorale.runtime.rank_memory import Loaded, RankMemory
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
from chorale.runtime.sizing.drafts import assumed_kind
from chorale.runtime.sizing.graph_sizes import MIXED_TOKENS
from chorale.runtime.sizing.memory import gib
from chorale.runtime.sizing.resolve import Decision, Resolved, cpu_precision, default_threads, resolve
from chorale.runtime.transfer.rank import RankTransfer
from chorale.runtime.worker import Worker
from chorale.serve.engine import compile_phase
from chorale.serve.engine.compile_phase import DryRank
from chorale.serve.engine.ranks import RankDevice, exchange_of, note_poorest, note_slow_exchange

if TYPE_CHECKING:
    import torch

    from chorale.kernels.triton.precompile.compiler import Precompiler


class Phases:
    """Reports the start of each phase and measures its seconds."""

    def __init__(self, progress: Progress | None) -> None:
        self.report: Progress = progress or _silent
        self.seconds: dict[str, float] = {}

    def end(self) -> None:
        """Report nothing any more: the engine is ready, also if it loads again after a sleep."""
        self.report = _silent

    @contextmanager
    def phase(self, name: str, message: str = "") -> Iterator[None]:
        self.report(name, None, message)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


def _silent(phase: str, fraction: float | None = None, message: str = "") -> None:
    return None


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """A rank that can run steps."""

    model: GptOss
    resolved: Resolved
    executor: LocalExecutor
    precompiler: Precompiler | None
    exchange: str
    adapters: AdapterStore | None


def open_rank(config: EngineConfig, model: ModelConfig, rank: int) -> Device:
    """Opens the device of one rank. Ranks on a CPU share its threads equally."""
    size = config.tensor_parallel_size
    threads = config.num_threads or default_threads(model.num_parameters, config.host_share)
    sharing = size * config.host_share
    return open_device(config.device, max(1, threads // size), sharing, rank=rank, ranks=size)


def build_rank(
    config: EngineConfig,
    folder: Path,
    model_config: ModelConfig,
    rank_device: RankDevice,
    grammars: GrammarCache,
    phases: Phases,
    pool: CompilePool | None = None,
) -> BuiltRank:
    """Loads one rank's share of the model and allocates its KV cache. Raises as ``build_engine``."""
    device, rank = rank_device.device, rank_device.rank
    name, dense = str(device.torch_device), model_config.dense_experts
    precision, fixed = cpu_precision(config, model_config), fixed_sums(config, model_config)
    ops = select_ops(config.ops, name, dense_experts=dense, rank=rank, precision=precision, fixed=fixed)
    precompiler = compile_phase.make_precompiler(config, ops, pool)
    resolve_with = partial(
        resolve,
        config,
        model_config,
        can_overlap=device.overlap,
        can_capture=device.can_capture and ops.capturable,
        supports_fp8_kv=ops.supports_fp8_kv,
        supports_compact=ops.pack_compact is not None,
        precision=precision if ops.name == "cpu" else None,
    )
    resolved = note_poorest(rank_device, resolve_with(rank_device.hardware), resolve_with)
    if name == "cpu" and (rank is None or fixed is not None):
        resolved = note_cpu_ops(config, ops, precision, resolved)
    if resolved.is_lean:
        device.pack_memory()
    if resolved.kv_dtype == E4M3:
        model_config = with_kv_scales(folder, model_config)
    sizes = step_sizes(model_config, resolved)
    peers = ops_over_peers(config, ops, sizes, device.torch_device)
    exchange = exchange_of(rank_device, is_over_peers=peers is not None)
    if exchange == "nccl":
        resolved = note_slow_exchange(config, rank_device, resolved)

    def dry_rank() -> DryRank | None:
        """Called only when needed: the simulated peer memory is as large as the real one."""
        if rank is None:
            return None
        own = select_ops(config.ops, name, dense_experts=dense, rank=rank.silent)
        if peers is not None:
            own = ops_over_peers(config, own, sizes, device.torch_device) or own
        return DryRank(rank.silent, own)

    ops = with_compact(peers or ops) if resolved.compact else peers or ops
    grammars.warm()  # runs concurrently with loading
    adapters = adapter_store(config, model_config, ops, resolved, device, rank)
    memory = rank_memory(config, folder, model_config, rank_device, ops, resolved, grammars, phases, adapters)
    with phases.phase("load", str(folder)):
        loaded = memory.load()
    if precompiler is not None:
        with phases.phase("compile"):
            compile_phase.DryModel(
                loaded.model, resolved, device, grammars, dry_rank(), loaded.drafts, adapters
            ).precompile(precompiler, phases.report)
            device.trim()
    profiler = None
    if config.profiler_config is not None:
        number = 0 if rank is None else rank.share.rank
        profiler = TorchProfiler(config.profiler_config, number, device.torch_device)
    with phases.phase("kv_pool", _pool_message(resolved)):
        executor = LocalExecutor(memory.make(), memory, profiler)
    grammars.wait_warm()
    return BuiltRank(loaded.model, resolved, executor, precompiler, exchange, adapters)


def adapter_store(
    config: EngineConfig,
    model: ModelConfig,
    ops: Ops,
    resolved: Resolved,
    device: Device,
    rank: Rank | None = None,
) -> AdapterStore | None:
    """Returns the memory for adapters, or None without --enable-lora. Raises ``ConfigError``."""
    if not config.enable_lora:
        return None
    if ops.lora is None:
        raise ConfigError(f"--enable-lora: the ops {ops.name} cannot run adapters; --ops reference can")
    part = model if rank is None else model.part(rank.share)
    if rank is not None and rank.share.by_expert and ops.lora.make_slots is not None:
        raise ConfigError(f"--enable-lora: the ops {ops.name} cannot run it with --enable-expert-parallel")
    # CPUs multiply float32 inputs exactly, so additions are float32 too.
    dtype = DTYPES["float32" if device.torch_device.type == "cpu" else resolved.dtype]
    sizes = SlotSizes(
        num_slots=config.max_loras,
        max_rank=config.max_lora_rank,
        dtype=dtype,
        num_layers=model.num_hidden_layers,
        hidden=model.hidden_size,
        query=part.num_attention_heads * part.head_dim,
        key=part.num_key_value_heads * part.head_dim,
        experts=part.num_local_experts,
        inter=part.intermediate_size,
        vocab=part.vocab_size,
    )
    return AdapterStore(
        model,
        device,
        dtype,
        num_slots=config.max_loras,
        num_host=config.max_cpu_loras or config.max_loras,
        max_rank=config.max_lora_rank,
        num_rows=resolved.limits.max_num_seqs,
        share=None if rank is None else rank.share,
        memory=ops.lora.make_slots and ops.lora.make_slots(sizes, device.torch_device),
    )


def rank_memory(
    config: EngineConfig,
    folder: Path,
    model_config: ModelConfig,
    rank_device: RankDevice,
    ops: Ops,
    resolved: Resolved,
    grammars: GrammarCache,
    phases: Phases,
    adapters: AdapterStore | None = None,
) -> RankMemory:
    """Returns the builder of a rank's weights and worker."""
    device, rank = rank_device.device, rank_device.rank
    plain = select_ops(
        config.ops,
        str(device.torch_device),
        dense_experts=model_config.dense_experts,
        precision=cpu_precision(config, model_config),
    )

    share = None if rank is None else rank.share
    target = weight_target(config, model_config, ops, resolved, device, share)

    def load() -> Loaded:
        model = load_model(folder, target, resolved, phases.report)
        embedding = model.weights.embedding
        embed = None if rank is None else partial(model.ops.embed, embedding)
        read = HeadTarget(model_config, folder, embedding, embed)
        drafts = draft_setup(config.speculative_config, read, plain, resolved, device)
        device.trim()
        return Loaded(model, drafts)

    def make(loaded: Loaded) -> Worker:
        rows = GrammarRows(device, grammars)
        return make_worker(loaded.model, resolved, device, rows, rank, loaded.drafts, adapters)

    transfer = None
    if config.weight_transfer_config is not None:
        number = 0 if share is None else share.rank
        transfer = RankTransfer(config.weight_transfer_config, target, device, number).execute
    return RankMemory(device, load, make, transfer, adapters)


def step_sizes(model: ModelConfig, resolved: Resolved) -> StepSizes:
    limits = resolved.limits
    # Captured steps are padded to these sizes even if the limits are smaller.
    tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs, *resolved.graph_rows, *MIXED_TOKENS)
    return StepSizes(model.hidden_size, tokens, DTYPES[resolved.dtype])


def ops_over_peers(config: EngineConfig, ops: Ops, sizes: StepSizes, device: torch.device) -> Ops | None:
    """Returns ``ops`` that sum over ranks with Chorale's kernels, or None if a library has to do it."""
    if config.disable_custom_all_reduce or ops.over_peers is None:
        return None
    return ops.over_peers(sizes, device)


def note_cpu_ops(config: EngineConfig, ops: Ops, precision: Precision, resolved: Resolved) -> Resolved:
    """Records the precision of the CPU kernels as a decision, or notes why they are not used."""
    if ops.name == "cpu":
        auto = config.cpu_precision == "auto"
        reasons = {"int8": "fewer bytes to read", "exact": "a small checkpoint"}
        made = Decision("cpu_precision", precision, reasons[precision] if auto else "requested", auto)
        return replace(resolved, decisions=(*resolved.decisions, made))
    if config.ops != "auto":
        return resolved
    note = f"the CPU kernels are not used: {library().why_not}; plain torch is used, several times slower"
    return replace(resolved, notes=(*resolved.notes, note))


def weight_target(
    config: EngineConfig,
    model: ModelConfig,
    ops: Ops,
    resolved: Resolved,
    device: Device,
    share: Share | None = None,
) -> Target:
    """Returns how a rank's weights are packed."""
    fp8, dtype = config.moe_activation_dtype == "fp8", DTYPES[resolved.dtype]
    return Target(model, ops, dtype, device.torch_device, fp8, share, resolved.host_embedding)


def load_model(folder: Path, target: Target, resolved: Resolved, progress: Progress | None = None) -> GptOss:
    """Loads the model, or only the target's share of it."""
    weights, share = load_weights(folder, target, progress), target.share
    own = target.config if share is None else target.config.part(share)
    return GptOss(own, weights, target.ops, resolved.limits.max_model_len)


def draft_setup(
    config: SpeculativeConfig | None, target: HeadTarget, ops: Ops, resolved: Resolved, device: Device
) -> DraftSetup | None:
    """Returns the setup for drafting, or None. ``ops``: those of a single rank. Raises ``ConfigError``."""
    if config is None:
        return None
    head = _load_head(config, target, ops, resolved, device) if config.has_head else None
    return DraftSetup(config.num_speculative_tokens, head, ops, _conditional(config.acceptance))


def _load_head(
    config: SpeculativeConfig, target: HeadTarget, ops: Ops, resolved: Resolved, device: Device
) -> DraftHead:
    dtype, longest = DTYPES[resolved.dtype], resolved.limits.max_model_len + MOST_DRAFT_TOKENS
    where = device.torch_device
    if config.model is not None:
        return load_head(config.model, target, ops, device=where, dtype=dtype, max_len=longest)
    embedding = target.embedding if target.embed is None else None
    head = published_head(target.config, assumed_kind(config))
    return random_head(head, ops, device=where, dtype=dtype, max_len=longest, embedding=embedding)


def _conditional(acceptance: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the probability that each token is accepted if those before it are, from the fractions of
    drafts whose first 1, 2, ... tokens are accepted."""
    shares = (1.0, *acceptance)
    return tuple(after / before if before else 0.0 for before, after in pairwise(shares))


def _pool_message(resolved: Resolved) -> str:
    limits = resolved.limits
    size = gib(limits.num_blocks * resolved.geometry.bytes_per_block)
    return f"{limits.num_blocks:,} blocks of {limits.block_size} tokens, {size}"
