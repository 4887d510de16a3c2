"""The simulated fleet: nothing is lost, its costs are the product's, and more knowledge is never worse."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks.fleet import (
    BLOCK,
    CHAT,
    Fleet,
    Result,
    Scenario,
    View,
    measure_router,
    prompt_share,
    step_seconds,
)
from chorale.client.routing import choose, cost

SMALL = replace(CHAT, clients=20, pause=5.0, num_systems=5)
LONG = replace(SMALL, tokens_in=2_000, turns=6, num_systems=0, system_tokens=0)
POLICIES = ("round robin", "power of two", "exact")


@cache
def result(scenario: Scenario) -> Result:
    return Fleet(scenario).run()


def small(policy: str, **more: object) -> Scenario:
    return Scenario(policy, SMALL, 12, 700, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lost", [0, 3])
def test_every_turn_is_answered_once(policy: str, lost: int) -> None:
    fleet = Fleet(small(policy, lost=lost))
    answered: Counter[int] = Counter()
    turns: dict[int, int] = {}
    begin, finish = fleet.begin, fleet.finish

    def begun(at: float, *, warm: bool = False) -> None:
        begin(at, warm=warm)
        turns[fleet.begun - 1] = fleet.turns_left[fleet.begun - 1]

    def finished(now: float, conversation: int, engine: int, tokens: int) -> None:
        answered[conversation] += 1
        finish(now, conversation, engine, tokens)

    fleet.begin, fleet.finish = begun, finished  # type: ignore[method-assign, assignment]
    found = fleet.run()
    assert answered == turns
    assert len(turns) == 700
    assert found.served == sum(turns.values())
    assert (found.retried > 0) == (lost > 0)
    assert found.requests == len(found.ttft) > 500
    assert 0 < found.hit_tokens <= found.possible_tokens < found.prompt_tokens
    assert min(found.ttft) > 0
    assert not fleet.truth.rows.any()
    assert not fleet.truth.pinned.any()
    assert not any(fleet.running)
    assert not fleet.context
    for cache_of, used in zip(fleet.caches, fleet.used, strict=True):
        assert sum(cache_of.values()) == used <= fleet.scenario.pool


def test_exact_routing_hits_more_and_answers_sooner() -> None:
    by_policy = {policy: result(Scenario(policy, LONG, 12, 600)) for policy in POLICIES}
    exact, blind = by_policy["exact"], [by_policy[policy] for policy in POLICIES[:2]]
    assert all(exact.hit_rate > each.hit_rate + 0.3 for each in blind)
    assert all(exact.percentile(50) < each.percentile(50) for each in blind)
    assert exact.hit_rate > 0.8 * exact.optimum


def test_old_news_costs_hits() -> None:
    now, late = result(small("exact")), result(small("exact", delay=30.0))
    assert now.hit_rate > late.hit_rate


def test_a_small_pool_evicts_what_was_used_least_recently() -> None:
    fleet = Fleet(Scenario("exact", LONG, 4, 200, pool=120_000))
    found = fleet.run()
    assert found.blocks_removed > 0
    assert found.hit_rate < result(Scenario("exact", LONG, 4, 200)).hit_rate
    assert set(fleet.holders) == {key for each in fleet.caches for key in each if key >= 0}


def test_the_costs_of_all_engines_are_those_of_the_product() -> None:
    numbers = random.Random(7)
    for _ in range(200):
        view, pool = View(9), 50_000
        for engine in range(9):
            view.rows[engine] = numbers.randrange(80)
            view.busy_until[engine] = numbers.uniform(-1, 3)
            view.pinned[engine] = numbers.randrange(60_000)
        hits = np.array([numbers.randrange(0, 500) * BLOCK for _ in range(9)], float)
        found = view.costs(1.0, 9_000, hits, pool).tolist()
        loads = [view.load(engine, 1.0, pool) for engine in range(9)]
        wanted = [cost(load, 9_000, int(hit)) for load, hit in zip(loads, hits, strict=True)]
        assert found == pytest.approx(wanted)
        fleet = Fleet(Scenario("exact", CHAT, 9, 1, pool=pool))
        fleet.systems[0], fleet.turn = hits, numbers.randrange(9)
        assert fleet.exact(1.0, view, 0, -1, 9_000) == choose(wanted, fleet.turn)


def test_times_of_steps_are_the_measured_ones() -> None:
    assert [1e3 * step_seconds(rows) for rows in (1, 8, 64, 256)] == pytest.approx([2.09, 5.20, 16.8, 23.5])
    assert step_seconds(512) == pytest.approx(2 * step_seconds(256))
    assert [prompt_share(rows) for rows in (0, 64)] == [1.0, 0.5]
    assert prompt_share(1) == pytest.approx(12 / 14.09)


def test_what_a_router_costs_is_measured_on_the_real_index() -> None:
    found = measure_router(5, 2_000, (1_024,))
    assert found.bytes_per_block > 16 + 33  # a hash, as an object
    assert found.stored_bytes > BLOCK + 9
    assert 9 <= found.removed_bytes < 12
    assert found.us_request[1_024] > 0
