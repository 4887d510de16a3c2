"""The cost of a replica, and the choice among several."""

from __future__ import annotations

from itertools import pairwise

import pytest

from chorale.client.routing.cost import ROW_TOKENS, Backlog, cost


def route(requests: int, prompt: int, cached: list[int], backlogs: list[Backlog]) -> list[int]:
    """How many of equal requests each replica gets, if each is still running when the last one comes.

    The first request at a replica computes the prompt; from then on it is cached there.
    """
    backlogs, cached, counts = list(backlogs), list(cached), [0] * len(backlogs)
    for number in range(requests):
        costs = [cost(backlog, prompt, hit) for backlog, hit in zip(backlogs, cached, strict=True)]
        replica = min(range(len(backlogs)), key=lambda each: (costs[each], (each - number) % len(backlogs)))
        counts[replica] += 1
        backlog = backlogs[replica]
        backlogs[replica] = Backlog(backlog.tokens_left, backlog.num_rows + 1, backlog.free_tokens)
        cached[replica] = prompt - 1
    return counts


def test_what_is_cached_is_not_computed() -> None:
    assert cost(Backlog(), 1000, 0) - cost(Backlog(), 1000, 992) == 992


def test_a_long_queue_outweighs_a_short_prefix_and_not_a_long_one() -> None:
    busy = Backlog(tokens_left=5_000, num_rows=2)
    assert cost(busy, 2_000, 1_900) > cost(Backlog(), 2_000, 0)
    assert cost(busy, 20_000, 19_000) < cost(Backlog(), 20_000, 0)


def test_a_conversation_stays_while_rows_are_nearly_even() -> None:
    assert cost(Backlog(num_rows=5), 3_000, 2_900) < cost(Backlog(num_rows=2), 3_000, 0)
    assert cost(Backlog(num_rows=40), 3_000, 2_900) > cost(Backlog(num_rows=2), 3_000, 0)


@pytest.mark.parametrize("requests", [2, 3, 8, 64, 65])
@pytest.mark.parametrize("replicas", [2, 4])
def test_equal_requests_are_spread(requests: int, replicas: int) -> None:
    counts = route(requests, 500, [0] * replicas, [Backlog()] * replicas)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("prefix", [200, 1_000, 10_000, 100_000])
def test_a_hot_prefix_spreads(prefix: int) -> None:
    """One replica has it, and hundreds want it: the others compute it once, and get their part."""
    counts = route(400, prefix, [prefix - 1, 0, 0, 0], [Backlog()] * 4)
    assert max(counts) <= 130
    assert min(counts) >= 70


def test_a_hot_prefix_that_is_short_spreads_at_once_and_a_long_one_later() -> None:
    def first_away(prefix: int) -> int:
        return next(n for n in range(1, 500) if route(n, prefix, [prefix - 1, 0], [Backlog()] * 2)[1])

    # The figures of docs/parallel.md.
    assert [first_away(prefix) for prefix in (400, 10_000, 100_000)] == [2, 15, 66]


def test_a_full_cache_counts() -> None:
    full, empty = Backlog(num_rows=1, free_tokens=100), Backlog(num_rows=1, free_tokens=100_000)
    assert cost(empty, 1_000, 0) == cost(Backlog(num_rows=1), 1_000, 0)
    assert cost(full, 1_000, 0) > cost(empty, 1_000, 0) + 900
    assert cost(full, 1_000, 950) == cost(empty, 1_000, 950)  # what is cached needs no room


def test_a_row_counts_as_many_tokens() -> None:
    assert cost(Backlog(num_rows=1), 0, 0) == pytest.approx(ROW_TOKENS, rel=0.05)
    rows = [cost(Backlog(num_rows=n), 0, 0) for n in range(100)]
    steps = [b - a for a, b in pairwise(rows)]
    assert steps == sorted(steps)  # each one more than the last
    assert len(set(steps)) > 90
