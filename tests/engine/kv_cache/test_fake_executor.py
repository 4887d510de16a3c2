"""FakeExecutor: it must notice what it is there to notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from chorale.engine.types import EngineLimits, IntArray, RowStart, SamplingSpec, StepPlan
from chorale.errors import EngineError
from tests.support.engine.fake_executor import FakeExecutor

LIMITS = EngineLimits(
    num_blocks=12, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=40, sliding_window=6
)


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def plan_of(tokens: list[int], computed: int = 0, step: int = 0, *, blocks: list[int]) -> StepPlan:
    """Row 0; block i of FULL is ``blocks[i]``, of WINDOW ``blocks[i] + 6``; new blocks only."""
    first = -(-computed // 4)
    new = range(first, len(blocks))
    appends = [(group, 0, index, blocks[index] + 6 * group) for index in new for group in (0, 1)]
    start = RowStart(0, np.array(tokens, np.int32), len(tokens), SamplingSpec(), 1, ())
    return StepPlan(
        step_id=step,
        starts=(start,) if computed == 0 else (),
        rows=ints(0),
        num_computed=ints(computed),
        num_new=ints(len(tokens)),
        samples=np.ones(1, np.bool_),
        token_ids=np.array(tokens, np.int32),
        appends=np.array(appends, np.int32).reshape(-1, 4).T.ravel(),
    )


@pytest.mark.parametrize(
    ("tokens", "changes", "fault"),
    [
        ([1, 2, 3, 4, 5], {}, "no block"),
        (list(range(8)), {"blocks": [0, 0]}, "another prefix"),
        ([1, 2, 3], {"appends": ints(0, 1, 0, 0, 0, 0, 0, 0)}, "another prefix"),  # of both groups
    ],
)
def test_a_missing_or_shared_block_raises(tokens: list[int], changes: dict[str, Any], fault: str) -> None:
    plan = plan_of(tokens, blocks=changes.pop("blocks", [0]))
    with pytest.raises(EngineError, match=fault):
        FakeExecutor(LIMITS).execute(dataclasses.replace(plan, **changes))


def test_a_block_taken_by_another_row_raises() -> None:
    executor = FakeExecutor(LIMITS)
    executor.execute(plan_of([1, 2, 3, 4, 5], blocks=[0, 1]))()
    appends = ints(0, 1, 1, 1, 0, 0, 0, 6)
    thief = dataclasses.replace(
        plan_of([9, 9, 9], blocks=[0], step=1), rows=ints(1), appends=appends, starts=()
    )
    start = RowStart(1, ints(9, 9, 9), 3, SamplingSpec(), 1, ())
    executor.execute(dataclasses.replace(thief, starts=(start,)))()
    with pytest.raises(EngineError, match="another prefix"):
        executor.execute(plan_of([-1], 5, 2, blocks=[0, 1]))
