"""Compiles the kernels that are not in Triton's disk cache before the first step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chorale.config.engine import EngineConfig
from chorale.kernels.ops import Ops
from chorale.kernels.triton.precompile import pool as pools
from chorale.machine.hardware import cpu_count
from chorale.model.gpt_oss import GptOss
from chorale.parallel.rank import Rank
from chorale.runtime.adapters import AdapterStore
from chorale.runtime.build_worker import make_worker
from chorale.runtime.device import Device
from chorale.runtime.drafts.drafting import DraftSetup
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.progress import Progress
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
from chorale.runtime.sizing.resolve import Resolved
from chorale.runtime.warmup.cache_key import cache_key
from chorale.runtime.warmup.captures import Preparation, all_preparations
from chorale.runtime.warmup.dry_run import AllowAllGrammars, dry_run, first_layers, uncaptured
from chorale.runtime.warmup.plans import drafting_plan, eager_plans, masked_plans

if TYPE_CHECKING:
    from chorale.kernels.triton.precompile.compiler import Precompiler

logger = logging.getLogger(__name__)
# The code that decides which kernels are launched, and how.
SOURCES = tuple(
    Path(__file__).parents[2] / package
    for package in ("config", "engine", "kernels", "model", "parallel", "runtime", "serve")
)
AT_LAUNCH = "kernels compile at their first launch"


@dataclass(frozen=True, slots=True)
class DryRank:
    """A rank for a dry run without exchanges, since other ranks may need no dry run."""

    rank: Rank
    ops: Ops


def make_precompiler(
    config: EngineConfig, ops: Ops, pool: pools.CompilePool | None = None
) -> Precompiler | None:
    """Returns None if precompilation is off or the ops need no compilation, or, with a warning, if the
    installed Triton is not supported. ``pool``: compile processes that were already started.
    """
    if not config.precompile_kernels or ops.precompiler is None:
        return None
    try:
        found: Precompiler = ops.precompiler(
            lambda: pool or pools.start(max(1, cpu_count() // config.tensor_parallel_size))
        )
        return found
    except Exception as error:
        logger.warning("%s: %s", AT_LAUNCH, error)
        return None


@dataclass(frozen=True, slots=True)
class DryModel:
    """One rank's model and how it is run. Its weights may be meta tensors."""

    model: GptOss
    resolved: Resolved
    device: Device
    grammars: GrammarCache
    dry: DryRank | None = None
    drafts: DraftSetup | None = None
    adapters: AdapterStore | None = None

    def precompile(self, precompiler: Precompiler, report: Progress) -> None:
        """Waits until the kernels needed for a start are compiled; others continue in the background.

        If this fails, it logs a warning, and kernels are compiled at their first launch.
        """
        try:
            if not precompiler.is_cached(self.facts(), self.device.torch_device, SOURCES):
                wait(precompiler, self.record(precompiler), report)
        except Exception as error:
            precompiler.cancel()
            logger.warning("%s: %s: %s", AT_LAUNCH, type(error).__name__, error)

    def facts(self) -> str:
        """Returns ``cache_key`` with the sizes of adapters, the drafting setup and the rank, whose noise
        starts at its own token id."""
        facts, drafts, dry = cache_key(self.model, self.resolved), self.drafts, self.dry
        if self.adapters is not None:
            facts = f"{facts}\nadapters of rank {self.adapters.max_rank}"
        if drafts is not None:
            head = None if drafts.head is None else drafts.head.config
            facts = f"{facts}\n{drafts.most_drafts} drafts by {head}, profile {bool(drafts.profile)}"
        if dry is None:
            return facts
        sums = "a library" if dry.ops.over_peers is not None else "kernels"
        return f"{facts}\nrank {dry.rank.share.rank} of {dry.rank.share.size}, sums by {sums}"

    def record(self, precompiler: Precompiler) -> int:
        """Records all kernels that steps will launch, and starts compiling them.

        Returns the number of kernels needed before the engine is ready. Raises ``EngineError``.
        """
        resolved, device, drafts = self.resolved, self.device, self.drafts
        small = replace(resolved, host_tier=None, limits=replace(resolved.limits, num_blocks=1))
        eager = replace(small, graph_rows=())
        never, rows = uncaptured(device), GrammarRows(device, self.grammars)
        masked_rows = AllowAllGrammars(device, self.grammars)
        short = first_layers(self.model)
        rank = None
        if self.dry is not None:
            rank, short.ops = self.dry.rank, self.dry.ops
        captured = LocalExecutor(make_worker(short, small, never, rows, rank, drafts, self.adapters))
        launched = LocalExecutor(make_worker(short, eager, never, rows, rank, drafts))
        with_masks = LocalExecutor(make_worker(short, eager, never, masked_rows, rank, drafts))
        graph_rows, limits = resolved.graph_rows, resolved.limits
        prepared: list[Preparation] = []
        if graph_rows:
            prepared = [*all_preparations(resolved).values()]
        plans, masked = eager_plans(limits, graph_rows), masked_plans(limits)
        if resolved.has_head:
            plans, masked = (
                (drafting_plan(plan, resolved.most_drafts) for plan in some) for some in (plans, masked)
            )
        return dry_run(precompiler, captured, prepared, ((launched, plans), (with_masks, masked)))


def wait(precompiler: Precompiler, count: int, report: Progress) -> None:
    """Waits for the first ``count`` kernels."""

    def tell(done: int, count: int) -> None:
        report("compile", done / max(count, 1), f"kernels: {done} of {count}")

    precompiler.wait(count, tell)
