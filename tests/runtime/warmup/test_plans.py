"""The dry run's steps have one row as well as several: each determines other kernels."""

from __future__ import annotations

from collections.abc import Iterable

from chorale.engine.types import EngineLimits, StepPlan
from chorale.runtime.warmup.plans import eager_plans

LIMITS = EngineLimits(
    num_blocks=100, block_size=16, max_num_seqs=32, max_num_batched_tokens=600, max_model_len=512
)


def shapes(plans: Iterable[StepPlan]) -> set[tuple[int, int]]:
    """(tokens, rows) of each."""
    return {(plan.num_tokens, len(plan.rows)) for plan in plans}


def test_prompts_of_one_row_and_of_several() -> None:
    found = shapes(eager_plans(LIMITS, graph_rows=range(1, 33)))
    assert {(tokens, rows) for tokens in (16, 128, 256, 512) for rows in (1, 4)} <= found
    assert {(1, 1), (16, 16)} <= found  # with filters
    assert max(found) == (600, 32)
