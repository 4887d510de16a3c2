"""The cost of a replica, and the choice among several."""

from __future__ import annotations

from itertools import pairwise

import pytest

from chorale.client.routing.cost import ROW_TOKENS, Load, cost


def route(requests: int, prompt: int, cached: list[int], loads: list[Load]) -> list[int]:
    """How many of equal requests each replica gets, if each is still running when the last one comes.

    The first request at a replica computes the prompt; from then on it is cached there.
    """
    loads, cached, counts = list(loads), list(cached), [0] * len(loads)
    for turn in range(requests):
        costs = [cost(load, prompt, hit) for load, hit in zip(loads, cached, strict=True)]
        place = min(range(len(loads)), key=lambda each: (costs[each], (each - turn) % len(loads)))
        counts[place] += 1
        load = loads[place]
        loads[place] = Load(load.tokens_left, load.num_rows + 1, load.free_tokens)
        cached[place] = prompt - 1
    return counts


def test_what_is_cached_is_not_computed() -> None:
    assert cost(Load(), 1000, 0) - cost(Load(), 1000, 992) == 992


def test_a_long_queue_outweighs_a_short_prefix_and_not_a_long_one() -> None:
    busy = Load(tokens_left=5_000, num_rows=2)
    assert cost(busy, 2_000, 1_900) > cost(Load(), 2_000, 0)
    assert cost(busy, 20_000, 19_000) < cost(Load(), 20_000, 0)


def test_a_conversation_stays_while_rows_are_nearly_even() -> None:
    assert cost(Load(num_rows=5), 3_000, 2_900) < cost(Load(num_rows=2), 3_000, 0)
    assert cost(Load(num_rows=40), 3_000, 2_900) > cost(Load(num_rows=2), 3_000, 0)


@pytest.mark.parametrize("requests", [2, 3, 8, 64, 65])
@pytest.mark.parametrize("replicas", [2, 4])
def test_equal_requests_are_spread(requests: int, replicas: int) -> None:
    counts = route(requests, 500, [0] * replicas, [Load()] * replicas)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("prefix", [200, 1_000, 10_000, 100_000])
def test_a_hot_prefix_spreads(prefix: int) -> None:
    """One replica has it, and hundreds want it: the others compute it once, and get their part."""
    counts = route(400, prefix, [prefix - 1, 0, 0, 0], [Load()] * 4)
    assert max(counts) <= 130
    assert min(counts) >= 70


def test_a_hot_prefix_that_is_short_spreads_at_once_and_a_long_one_later() -> None:
    def first_away(prefix: int) -> int:
        return next(n for n in range(1, 500) if route(n, prefix, [prefix - 1, 0], [Load()] * 2)[1])

    # The figures of docs/parallel.md.
    assert [first_away(prefix) for prefix in (400, 10_000, 100_000)] == [2, 15, 66]


def test_a_full_cache_counts() -> None:
    full, empty = Load(num_rows=1, free_tokens=100), Load(num_rows=1, free_tokens=100_000)
    assert cost(empty, 1_000, 0) == cost(Load(num_rows=1), 1_000, 0)
    assert cost(full, 1_000, 0) > cost(empty, 1_000, 0) + 900
    assert cost(full, 1_000, 950) == cost(empty, 1_000, 950)  # what is cached needs no room


def test_a_row_counts_as_many_tokens() -> None:
    assert cost(Load(num_rows=1), 0, 0) == pytest.approx(ROW_TOKENS, rel=0.05)
    rows = [cost(Load(num_rows=n), 0, 0) for n in range(100)]
    steps = [b - a for a, b in pairwise(rows)]
    assert steps == sorted(steps)  # each one more than the last
    assert len(set(steps)) > 90
