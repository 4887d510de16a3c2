"""Batch work yields: to prompts, for rows and blocks, and to the time that others would wait for a step."""

from __future__ import annotations

import dataclasses

import numpy as np

from chorale.engine.plan import StepRecord
from chorale.engine.scheduling.batch_share import QUIET, BatchShare
from chorale.engine.scheduling.pace import PromptPace
from chorale.engine.types import EngineLimits
from tests.support.engine.recording import DEFAULTS, Engine, ends


def names(engine: Engine) -> list[str]:
    """The requests of the newest plan."""
    rows = engine.core._engine.rows
    found = (rows.sequences[row] for row in engine.plans[-1].rows.tolist())
    return [sequence.request_id for sequence in found if sequence is not None]


def test_a_step_with_another_prompt_computes_no_batch_row() -> None:
    engine = Engine(max_num_batched_tokens=8)
    for name in "ab":
        engine.add(name, 4, max_tokens=30, is_batch=True)
    engine.step()
    assert names(engine) == ["a", "b"]
    engine.add("x", [3] * 12, max_tokens=5)
    seen = []
    for _ in range(4):
        engine.step()
        seen.append(names(engine))
    assert seen == [["x"], ["x"], ["a", "b", "x"], ["a", "b", "x"]]


def test_batch_work_that_waits_has_no_step_with_others() -> None:
    engine = Engine(batch_waits=True)
    for name in "ab":
        engine.add(name, 4, max_tokens=8, is_batch=True)
    engine.step()
    engine.add("x", 4, max_tokens=5)
    seen = []
    for _ in range(12):
        engine.step()
        seen.append(names(engine))
    assert all("x" not in found or found == ["x"] for found in seen)
    assert seen[:4] == [["x"]] * 4
    assert ["a", "b"] in seen


def test_batch_work_is_preempted_for_other_requests_under_fcfs() -> None:
    engine = Engine(max_num_seqs=2, num_blocks=16)
    engine.add("a", 20, max_tokens=20, is_batch=True)
    engine.step()
    for name in "xyz":
        engine.add(name, [ord(name)] * 20, max_tokens=4)
    chunks = engine.run()
    assert [name for name, _, _ in ends(chunks)] == ["x", "y", "z", "a"]
    assert engine.core.stats().num_preemptions > 0


def test_batch_work_leaves_rows_and_blocks_free() -> None:
    engine = Engine(max_num_seqs=8, num_blocks=64)
    for index in range(12):
        engine.add(f"b{index}", [index + 1] * 8, max_tokens=100, is_batch=True)
    for _ in range(12):
        engine.step()
    assert len(engine.core._engine.rows.free) == 1
    assert engine.core._engine.cache.pool.num_free >= 64 // 8 - 8
    engine.add("x", 5, max_tokens=2)
    engine.step()
    assert names(engine)[-1] == "x"
    assert engine.core.stats().num_preemptions == 0


def test_priority_counts_among_batch_work_under_its_policy_only() -> None:
    for policy, order in (("priority", "xba"), ("fcfs", "xab")):
        engine = Engine(policy=policy, max_num_seqs=1)
        engine.add("a", 4, max_tokens=2, priority=1, is_batch=True)
        engine.add("b", 4, max_tokens=2, priority=0, is_batch=True)
        engine.add("x", 4, max_tokens=2, priority=2**31 - 1)
        assert "".join(name for name, _, _ in ends(engine.run())) == order


# --------------------------------------------------------------------------- the share


def share(delay: float = 0.01, long: float = 0.04, **changes: float) -> tuple[BatchShare, PromptPace]:
    limits = EngineLimits(
        **(DEFAULTS | {"max_num_seqs": 256, "batch_delay": delay, "long_batch_delay": long} | changes)
    )
    pace = PromptPace(dataclasses.replace(limits, prompt_delay=0.1, max_prompt_delay=0.25))
    return BatchShare(limits, pace), pace


def played(rows: BatchShare, pace: PromptPace, now: float, *, others: int = 0, steps: int = 300) -> float:
    """Decode steps that take 2 ms and 0.1 ms for each row; returns the seconds of the last."""
    seconds = 0.0
    for _ in range(steps):
        num = rows.begin(others, now)
        seconds = 0.002 + 1e-4 * (num + others)
        record = StepRecord(None, num + others, [], num_batch=num)  # type: ignore[arg-type]
        rows.observe(record, seconds)
        pace.observe(StepRecord(None, others, []), 0.002 + 1e-4 * others)  # type: ignore[arg-type]
    return seconds


def test_steps_with_batch_work_take_about_as_long_as_they_may() -> None:
    rows, pace = share()
    assert 0.008 <= played(rows, pace, 100.0) <= 0.0105
    assert played(rows, pace, 100.0 + QUIET + 1) > 0.02  # nothing else to do: longer steps
    rows.see_others(200.0)
    assert played(rows, pace, 200.5, steps=1) <= 0.0105  # at once, not after learning again


def test_a_step_is_at_most_a_quarter_longer_than_that_of_the_others() -> None:
    rows, pace = share(delay=0.001)
    alone = 0.002 + 1e-4 * 200
    assert alone < played(rows, pace, 100.0, others=200) <= alone * 1.26


def test_prompts_save_up_the_time_for_a_chunk() -> None:
    rows, pace = share(delay=0.004)
    pace._least_chunk, pace._costs[0][0] = 1024, 2e-5  # a quarter of it takes 5 ms
    pace._decodes[5] = 0.0035
    given = []
    for _ in range(40):
        rows.begin(20, 100.0)
        seconds = rows.prompt_seconds(20, 0)
        given.append(seconds is not None)
        if seconds is not None:
            rows.spend(0.005)
    assert 2 <= sum(given) <= 10, given


def test_without_a_bound_batch_work_fills_the_step() -> None:
    rows, pace = share(delay=0.0, long=0.0)
    assert rows.begin(3, 1.0) == 256
    assert rows.prompt_seconds(3, 256) == 0.0
    pace.begin(1, 1)
    bound = pace._bound
    pace.begin_batch(0.0)
    assert pace._bound == bound
    assert np.isfinite(bound)
