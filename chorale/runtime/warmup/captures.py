"""The first step, and the graphs that are captured before a step needs them."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from chorale.engine.types import CacheGroup, EngineLimits, StepPlan
from chorale.kernels.adapters import ATTENTION, EXPERTS
from chorale.parallel.wire import WorkerCall
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.progress import Progress
from chorale.runtime.sizing.graph_sizes import (
    BUSY_TOKENS,
    FILTERED_ROWS,
    FIRST_ROWS,
    FIRST_TOKENS,
    MIXED_ROWS,
    MIXED_TOKENS,
    MOST_DRAFTING_ROWS,
    context_sizes,
    draft_sizes,
)
from chorale.runtime.sizing.resolve import Resolved
from chorale.runtime.warmup.plans import eager_plan

# Seconds at start-up for graphs after the first ones. The rest is captured after a second without work, one
# at a time, so that a request waits for at most one capture.
CAPTURE_SECONDS = 1.0
Preparation = tuple[WorkerCall, bool]  # the call that captures a graph, and whether it runs at start-up


def warm_up(executor: LocalExecutor, resolved: Resolved) -> None:
    """Runs the first step while the pool is unused. Raises ``EngineError``."""
    executor.execute(first_plan(resolved.limits))()


def first_plan(limits: EngineLimits) -> StepPlan:
    """Returns a plan of one token in row 0, in the first two blocks (or the only one)."""
    appends = [*CacheGroup, 0, 0, 0, 0, 0, min(1, limits.num_blocks - 1)]
    return replace(eager_plan(1, 1, limits, filtered=False), appends=np.array(appends, np.int32))


def capture_first(
    executor: LocalExecutor, resolved: Resolved, report: Progress, budget: float = CAPTURE_SECONDS
) -> None:
    """Captures the common steps, runs the largest, and continues for ``budget`` seconds.

    The rest is captured when the engine is idle. Raises ``EngineError``.
    """
    # Those of start-up first; the sort is stable.
    ordered = sorted(all_preparations(resolved).items(), key=lambda item: not item[1][1])
    start = time.perf_counter()
    for number, (name, (action, is_first)) in enumerate(ordered):
        if is_first or time.perf_counter() - start < budget:
            report("graphs", number / len(ordered), name)
            executor.prepare(action)
        else:
            executor.later(action)


def all_preparations(resolved: Resolved) -> dict[str, Preparation]:
    """Returns name -> preparation, for a device with graphs."""
    found = preparations(resolved.graph_rows, resolved.limits)
    return found | draft_preparations(resolved) | adapter_preparations(resolved)


def draft_preparations(resolved: Resolved) -> dict[str, Preparation]:
    """Returns the preparations for steps with drafts, the longest first, because they can replace the
    others."""
    found: dict[str, Preparation] = {}
    if not resolved.most_drafts:
        return found
    for rows in (size for size in resolved.graph_rows if size <= MOST_DRAFTING_ROWS):
        for size in reversed(draft_sizes(resolved.most_drafts)):
            for longest in context_sizes(rows * (1 + size), resolved.limits.max_model_len):
                sizes = {"rows": rows, "width": 1 + size, "longest": longest}
                name = f"{rows} rows with drafts of {size} tokens, up to {longest} tokens"
                is_first = rows in FIRST_ROWS[:3] and size == resolved.most_drafts
                found[name] = (WorkerCall("capture_verify", sizes), is_first)
    return found


def adapter_preparations(resolved: Resolved) -> dict[str, Preparation]:
    """Returns the preparations for steps with adapters of attention, and of experts too. Others are rare."""
    found: dict[str, Preparation] = {}
    limits = resolved.limits
    most = min(limits.max_num_batched_tokens, limits.max_model_len)
    for reach in (ATTENTION, EXPERTS) if limits.max_loras else ():
        kind = "attention's adapters" if reach == ATTENTION else "experts' adapters"
        for rows in resolved.graph_rows:
            sizes = {"rows": rows, "longest": limits.max_model_len, "reach": reach}
            found[f"decode, {rows} rows, {kind}"] = (WorkerCall("capture_decode", sizes), False)
        for tokens in sorted({size for size in MIXED_TOKENS if size < most} | {most}):
            sizes = {"num_tokens": tokens, "rows": MIXED_ROWS[0], "reach": reach}
            found[f"prefill, {tokens} tokens, {kind}"] = (WorkerCall("try_size", sizes), False)
    return found


def preparations(graph_rows: tuple[int, ...], limits: EngineLimits) -> dict[str, Preparation]:
    """Returns name -> preparation for steps without drafts."""
    longest, most = limits.max_model_len, min(limits.max_num_batched_tokens, limits.max_model_len)
    found: dict[str, Preparation] = {}

    def decode(size: int, context: int, filtered: bool, is_first: bool) -> None:
        name = f"decode, {size} rows of up to {context} tokens{', filtered' if filtered else ''}"
        action = WorkerCall("capture_decode", {"rows": size, "longest": context, "filtered": filtered})
        found[name] = (action, is_first)

    def mixed(tokens: int, rows: int, is_first: bool) -> None:
        action = WorkerCall("try_size", {"num_tokens": tokens, "rows": rows})
        found[f"prefill, {tokens} tokens, {rows} rows"] = (action, is_first)

    for rows in MIXED_ROWS[2:]:
        for tokens in BUSY_TOKENS:
            if tokens < most and rows // 4 <= limits.max_num_seqs:
                mixed(tokens, rows, False)
    for size in graph_rows:
        for context in context_sizes(size, longest):
            decode(size, context, False, size in FIRST_ROWS)
    for tokens in sorted({size for size in MIXED_TOKENS if size < most} | {min(most, 2048), most}):
        for rows in MIXED_ROWS[:2]:
            is_first = rows == MIXED_ROWS[0] and (tokens in FIRST_TOKENS or tokens == most)
            if tokens in MIXED_TOKENS or rows == MIXED_ROWS[0]:
                mixed(tokens, rows, is_first)
    for size in graph_rows:
        if size <= FILTERED_ROWS:
            decode(size, context_sizes(size, longest)[-1], True, False)
    return found
