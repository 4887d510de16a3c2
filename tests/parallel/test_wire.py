"""Plans on their way to the ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from chorale.engine.core import EngineCore
from chorale.engine.types import HostLoad, RowStart, StepPlan, Transfers
from chorale.parallel.wire import Plan, _array, decode_to_rank, encode
from tests.support.engine.drafters import Nonsense
from tests.support.engine.recording import Engine


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Transfers | HostLoad | RowStart):
        fields = dataclasses.fields(one)
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def sent(plan: StepPlan) -> StepPlan:
    message = decode_to_rank(encode(Plan(plan)))
    assert isinstance(message, Plan)
    return message.step


def plans_with_loads() -> list[StepPlan]:
    talk = Engine(num_blocks=40, num_host_slots=200, max_saved_pages=40, max_num_batched_tokens=64)
    for number in (0, 1, 2, 0):
        talk.add(f"t{len(talk.plans)}", [number * 100 + place for place in range(100)], max_tokens=2)
        talk.run()
    assert any(plan.transfers.loads for plan in talk.plans if plan.transfers)
    assert any(plan.transfers.finished for plan in talk.plans if plan.transfers)
    return talk.plans


def test_arrays_are_read_by_their_scalar_type() -> None:
    """From numpy 2.5 on, the type that the decoder passes does not equal ``BoolArray``."""
    assert _array(np.ndarray[tuple[int], np.dtype[np.bool_]], b"\1\0\1").tolist() == [True, False, True]
    assert _array(np.ndarray[tuple[int], np.dtype[np.int32]], b"\1\0\0\0").tolist() == [1]


def test_a_plan_arrives_as_it_was() -> None:
    """Plans of an engine with prefill, decodes, several choices, prompt log-probabilities and drafts."""
    engine = Engine()
    engine.add("a", list(range(40)), max_tokens=9, n=2, seed=2**62 + 3, logit_bias={3: 1.5})
    engine.add("b", list(range(5)), max_tokens=20, prompt_logprobs=2, bad_words=((1, 2), (3,)))
    engine.run()
    engine.core = EngineCore(engine.limits, engine.executor, drafter=Nonsense(1000, 3))
    engine.executor._next_step_id = None
    engine.add("c", 9, max_tokens=9)
    engine.run()
    plans = [*engine.plans, *plans_with_loads()]
    assert sum(plan.transfers is not None for plan in plans) > 5
    assert any(plan.num_drafts is not None for plan in plans)
    assert any(plan.starts for plan in plans)
    assert any(plan.prompt_logprob_rows for plan in plans)
    for plan in plans:
        found = sent(plan)
        for field in dataclasses.fields(StepPlan):
            assert same(getattr(found, field.name), getattr(plan, field.name)), field.name
