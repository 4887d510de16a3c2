"""The cost of a replica, and the choice among several."""

from __future__ import annotations

from itertools import pairwise

import pytest

from chorale.client.routing.follower import ROW_TOKENS, Backlog, cost


def route(requests: int, prompt: int, cached: list[int], backlogs: list[Backlog]) -> list[int]:
    """Return how many of ``requests`` equal requests each replica gets; none ends before the last is routed.

    The first request on a replica computes the prompt, which is cached there from then on.
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


def test_a_cached_token_costs_nothing() -> None:
    assert cost(Backlog(), 1000, 0) - cost(Backlog(), 1000, 992) == 992


def test_a_long_queue_outweighs_a_short_cached_prefix_but_not_a_long_one() -> None:
    busy = Backlog(tokens_left=5_000, num_rows=2)
    assert cost(busy, 2_000, 1_900) > cost(Backlog(), 2_000, 0)
    assert cost(busy, 20_000, 19_000) < cost(Backlog(), 20_000, 0)


def test_a_conversation_stays_on_its_replica_while_rows_are_nearly_even() -> None:
    assert cost(Backlog(num_rows=5), 3_000, 2_900) < cost(Backlog(num_rows=2), 3_000, 0)
    assert cost(Backlog(num_rows=40), 3_000, 2_900) > cost(Backlog(num_rows=2), 3_000, 0)


@pytest.mark.parametrize("prefix", [200, 1_000, 10_000, 100_000])
def test_a_hot_prefix_spreads_to_all_replicas(prefix: int) -> None:
    """One replica has the prefix cached. The others compute it once, and then serve their share."""
    counts = route(400, prefix, [prefix - 1, 0, 0, 0], [Backlog()] * 4)
    assert max(counts) <= 130
    assert min(counts) >= 70


def test_a_short_hot_prefix_spreads_at_once_and_a_long_one_later() -> None:
    def first_away(prefix: int) -> int:
        return next(n for n in range(1, 500) if route(n, prefix, [prefix - 1, 0], [Backlog()] * 2)[1])

    # The figures of docs/explanation/parallel.md.
    assert [first_away(prefix) for prefix in (400, 10_000, 100_000)] == [2, 15, 66]


def test_tokens_that_do_not_fit_the_free_cache_cost_more() -> None:
    full, empty = Backlog(num_rows=1, free_tokens=100), Backlog(num_rows=1, free_tokens=100_000)
    assert cost(empty, 1_000, 0) == cost(Backlog(num_rows=1), 1_000, 0)
    assert cost(full, 1_000, 0) > cost(empty, 1_000, 0) + 900
    assert cost(full, 1_000, 950) == cost(empty, 1_000, 950)  # cached tokens need no room


def test_each_further_row_costs_more_than_the_last() -> None:
    assert cost(Backlog(num_rows=1), 0, 0) == pytest.approx(ROW_TOKENS, rel=0.05)
    rows = [cost(Backlog(num_rows=n), 0, 0) for n in range(100)]
    steps = [b - a for a, b in pairwise(rows)]
    assert steps == sorted(steps)
    assert len(set(steps)) > 90
