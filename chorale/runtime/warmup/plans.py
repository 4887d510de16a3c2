"""Plans of steps without a graph, for the dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from chorale.engine.types import EngineLimits, RowStart, SamplingSpec, StepPlan
from chorale.runtime.sizing.graph_sizes import row_sizes

# Such steps can have any size; they launch the kernels of one of the two nearest sizes in this list.
_EAGER_SIZES = (*range(16, 128, 16), *range(128, 2048, 32), *range(2048, 8192 + 1, 1024))


def eager_plans(limits: EngineLimits, graph_rows: Sequence[int]) -> Iterator[StepPlan]:
    """Yields plans without a graph: all sizes, one prompt or several rows, with and without filters."""
    most, rows_most = limits.max_num_batched_tokens, limits.max_num_seqs
    for rows in row_sizes(rows_most):
        if not graph_rows or rows > graph_rows[-1]:
            yield eager_plan(rows, rows, limits, filtered=False)
    for rows in sorted({1, min(16, rows_most)}):
        yield eager_plan(rows, rows, limits, filtered=True)
    for rows in sorted({1, min(4, rows_most)}):  # the number of rows determines how contexts are split
        for tokens in (16, 128, 256, 512, 1024):
            if tokens < most:
                yield eager_plan(tokens, rows, limits, filtered=False)
    for tokens in eager_sizes(most):
        rows = min(40, tokens, rows_most)
        yield eager_plan(min(tokens, rows * limits.max_model_len), rows, limits, filtered=False)


def drafting_plan(plan: StepPlan, num_made: int) -> StepPlan:
    """Returns a plan after whose step a head makes drafts for every row."""
    return replace(
        plan, num_made=num_made, makes=plan.samples, following=np.full(len(plan.rows), -1, np.int32)
    )


def masked_plans(limits: EngineLimits) -> Iterator[StepPlan]:
    """Yields plans that sample with a grammar: few and many rows, with and without filters."""
    for rows in sorted({1, min(16, limits.max_num_seqs)}):
        for filtered in (False, True):
            yield eager_plan(rows, rows, limits, filtered=filtered)


def eager_sizes(most: int) -> list[int]:
    """Returns numbers of tokens, up to ``most``, that together launch every kernel of steps without a
    graph."""
    return [*(size for size in _EAGER_SIZES if size < most), most]


def eager_plan(tokens: int, rows: int, limits: EngineLimits, *, filtered: bool) -> StepPlan:
    """Returns a plan of ``tokens`` tokens in ``rows`` new rows, all in block 0: one token each, the rest in
    the first rows as far as ``max_model_len`` allows."""
    spec = SamplingSpec(top_p=0.5) if filtered else SamplingSpec()
    new = np.ones(rows, np.int32)
    missing = tokens - rows
    for row in range(rows):
        more = min(missing, limits.max_model_len - 1)
        new[row] += more
        missing -= more
    one, eos = np.zeros(1, np.int32), limits.eos_token_ids
    return StepPlan(
        step_id=-1,
        starts=tuple(RowStart(row, one, 1, spec, 0, eos) for row in range(rows)),
        rows=np.arange(rows, dtype=np.int32),
        num_computed=np.zeros(rows, np.int32),
        num_new=new,
        samples=np.ones(rows, np.bool_),
        token_ids=np.zeros(int(new.sum()), np.int32),
        appends=np.zeros(0, np.int32),
    )
