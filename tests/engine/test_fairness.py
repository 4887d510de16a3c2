"""Owners take turns: for places in the queue, prompts, rows and blocks. With one owner nothing changes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from chorale.engine.types import NOBODY, Owner
from tests.support.engine.recording import Engine, ends

A, B = Owner("a"), Owner("b")


def prompt(number: int, length: int) -> list[int]:
    return [20 + number % 900] * length


def crowd(
    engine: Engine, owner: Owner, count: int, *, length: int = 8, max_tokens: int = 20, at: int = 0
) -> None:
    for number in range(at, at + count):
        name = f"{owner.name}{number}"
        engine.add(name, prompt(number, length), max_tokens=max_tokens, owner=owner)


def rows_of(engine: Engine) -> dict[str, int]:
    running = sorted(each.request_id[0] for each in engine.core._engine.running.values())
    return {name: len(list(group)) for name, group in itertools.groupby(running)}


def steps_to_first_token(engine: Engine, name: str) -> int:
    for number in range(1, 400):
        if any(chunk.request_id == name and chunk.token_ids for chunk in engine.step()):
            return number
    raise AssertionError("no token")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "limits",
    [{"max_num_seqs": 8}, {"max_num_seqs": 64, "num_blocks": 40}, {"max_num_batched_tokens": 16}],
    ids=["rows", "blocks", "budget"],
)
def test_another_owners_prompt_is_in_the_next_plan(overlap: bool, limits: dict[str, Any]) -> None:
    """With overlap, a row that is taken from the crowd is free one step later."""
    alone, beside = Engine(async_scheduling=overlap, **limits), Engine(async_scheduling=overlap, **limits)
    crowd(beside, A, 100)
    for _ in range(12):
        beside.step()
    for engine in (alone, beside):
        engine.add("b", prompt(500, 8), max_tokens=4, owner=B)
    assert steps_to_first_token(beside, "b") <= steps_to_first_token(alone, "b") + overlap


def test_a_long_prompt_of_another_owner_does_not_delay_a_short_one() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", prompt(1, 160), max_tokens=4, owner=A)
    engine.step()
    engine.add("b", prompt(2, 6), max_tokens=4, owner=B)
    assert steps_to_first_token(engine, "b") <= 3


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_rows_follow_the_weights(weight: float) -> None:
    engine = Engine(max_num_seqs=8, num_blocks=200)
    crowd(engine, A, 40, max_tokens=60)
    for _ in range(6):
        engine.step()
    assert rows_of(engine) == {"a": 8}
    crowd(engine, Owner("b", weight), 40, max_tokens=60)
    for _ in range(20):
        engine.step()
    assert rows_of(engine) == {"a": 8 / (1 + weight), "b": 8 * weight / (1 + weight)}


def test_the_newest_row_of_the_owner_above_its_share_is_preempted() -> None:
    engine = Engine(max_num_seqs=4)
    crowd(engine, A, 3)
    crowd(engine, B, 1)
    for _ in range(3):
        engine.step()
    engine.add("c", 8, max_tokens=2, owner=Owner("c"))
    engine.step()
    states = engine.core._engine.requests.values()
    preempted = [s.request.request_id for s in states if s.sequences[0].num_preemptions]
    assert preempted == ["a2"]


def test_an_owner_within_its_share_keeps_its_rows() -> None:
    engine = Engine(max_num_seqs=4, num_blocks=200)
    crowd(engine, A, 2, max_tokens=40)
    crowd(engine, B, 2, max_tokens=40)
    for _ in range(3):
        engine.step()
    crowd(engine, A, 5, at=10)
    for _ in range(10):
        engine.step()
    assert engine.core.stats().num_preemptions == 0


def test_turns_go_by_tokens_and_not_by_requests() -> None:
    """Long prompts of one owner, short ones of the other: each has about half of the tokens."""
    engine = Engine(max_num_seqs=1, num_blocks=200, max_num_batched_tokens=64)
    crowd(engine, A, 30, length=60, max_tokens=1)
    crowd(engine, B, 200, length=6, max_tokens=1)
    ended = [name for name, _, _ in ends([chunk for _ in range(60) for chunk in engine.step()])]
    num_a = 60 * sum(name[0] == "a" for name in ended)
    num_b = 6 * sum(name[0] == "b" for name in ended)
    assert abs(num_a - num_b) <= 120
    assert num_a > 60


def test_nobody_saves_up_turns() -> None:
    """An owner that was away while another had thousands of tokens has no claim on all of what follows."""
    engine = Engine(max_num_seqs=2, num_blocks=200)
    crowd(engine, B, 1, max_tokens=1)
    crowd(engine, A, 40, max_tokens=20)
    for _ in range(200):
        engine.step()
    crowd(engine, B, 40, max_tokens=20, at=100)
    ended = [name[0] for name, _, _ in ends([chunk for _ in range(200) for chunk in engine.step()])]
    assert abs(ended.count("a") - ended.count("b")) <= 2


def test_one_owner_is_served_as_without_owners() -> None:
    plans = []
    for owner in (NOBODY, A):
        engine = Engine(max_num_seqs=4, num_blocks=24)
        crowd(engine, owner, 20)
        engine.run()
        plans.append([(plan.rows.tolist(), plan.num_new.tolist()) for plan in engine.plans])
    assert plans[0] == plans[1]


def test_accounts_end_with_their_requests() -> None:
    engine = Engine()
    for number in range(50):
        engine.add(str(number), 4, max_tokens=2, owner=Owner(str(number)))
    engine.core.abort("7")
    engine.run()
    assert engine.core._engine.accounts._by_owner == {}
