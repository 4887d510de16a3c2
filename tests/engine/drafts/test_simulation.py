"""Simulated requests with drafts: each gets the tokens that it would get alone."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest

from chorale.engine.drafts.head import HeadDrafter
from chorale.engine.engine_state import Drafter
from tests.engine.test_simulation import tight_limits
from tests.support.engine.drafters import Future, Oracle, restless
from tests.support.engine.simulation import VOCAB, Life, simulate

NUM_REQUESTS = 30  # of each engine
DRAFTERS: dict[str, dict[str, Any]] = {
    "right": {"most": 5},
    "wrong": {"most": 3, "wrong": 1.0},
    "any length": {"most": 40, "varies": True},
    "anything": {"most": 9, "varies": True, "wrong": 0.3},
}
# Of each drafter at each depth one block size; the others are marked slow.
SHORT = {"right": (16, 1), "wrong": (1, 7), "any length": (7, 16), "anything": (16, 7)}
CASES = [
    pytest.param(kind, depth, size, marks=() if SHORT[kind][depth] == size else pytest.mark.slow)
    for kind in DRAFTERS
    for depth in (0, 1)
    for size in (1, 7, 16)
]
HEAD_CASES = [
    pytest.param(depth, size, marks=() if size in short else pytest.mark.slow)
    for depth, short in ((0, (4,)), (1, (1, 16)))
    for size in (1, 4, 16)
]


def oracle(options: dict[str, Any], future: Future) -> Drafter:
    return Oracle(future, vocab_size=VOCAB, **options)


def check_counts(life: Life, kind: str) -> None:
    """Something was drafted, and accepted as the kind of drafter says."""
    stats = life.core.stats()
    assert stats.num_draft_tokens > 0
    accepted = stats.num_accepted_tokens / stats.num_draft_tokens
    assert {"right": accepted == 1.0, "wrong": accepted == 0.0}.get(kind, 0.0 < accepted <= 1.0)


@pytest.mark.parametrize(("kind", "depth", "block_size"), CASES)
def test_every_request_gets_the_tokens_it_would_get_alone(
    kind: str, depth: Literal[0, 1], block_size: int
) -> None:
    """A failure replays from its seed."""
    preemptions = hits = 0
    for seed in range(2):
        rng = random.Random(f"{depth}{block_size}{seed}")
        limits = tight_limits(rng, depth, True, block_size, "priority" if seed else "fcfs")
        life = simulate(limits, NUM_REQUESTS, seed, partial(oracle, DRAFTERS[kind]))
        check_counts(life, kind)
        preemptions += life.core.stats().num_preemptions
        hits += life.core.stats().prefix_cache_hits
    assert preemptions > 0
    assert hits > 0


def head(future: Future) -> HeadDrafter:
    return HeadDrafter(5, 64)


@pytest.mark.parametrize(("depth", "block_size"), HEAD_CASES)
def test_drafts_of_a_head_change_no_token(depth: Literal[0, 1], block_size: int) -> None:
    """The fake device has the drafts; plans are made before it is known how many of them were kept."""
    preemptions = 0
    for seed in range(2):
        rng = random.Random(f"{depth}{block_size}{seed}")
        limits = tight_limits(rng, depth, True, block_size, "priority" if seed else "fcfs")
        life = simulate(limits, NUM_REQUESTS, seed, head)
        check_counts(life, "head")
        preemptions += life.core.stats().num_preemptions
    assert preemptions > 0


@pytest.mark.parametrize(
    ("depth", "block_size"),
    [(0, 16), (1, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 1), (1, 16)))],
)
def test_a_head_that_is_switched_on_and_off_changes_no_token(depth: Literal[0, 1], block_size: int) -> None:
    """What was drafted before an interruption is not what follows after it."""
    limits = tight_limits(random.Random(f"{depth}{block_size}"), depth, True, block_size, "fcfs")
    limits = replace(limits, draft_tokens=restless(5, limits.max_num_seqs))
    life = simulate(limits, 2 * NUM_REQUESTS, 1, head)
    check_counts(life, "head")


@pytest.mark.parametrize("depth", [0, 1])
def test_limits_of_drafts_by_rows_change_no_token(depth: Literal[0, 1]) -> None:
    limits = tight_limits(random.Random(depth), depth, True, 4, "fcfs")
    limits = replace(limits, draft_tokens=restless(6, limits.max_num_seqs))
    stats = simulate(limits, 50, 1, partial(oracle, DRAFTERS["anything"])).core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert len(stats.accepted_per_position) <= 6
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert stats.num_drafts < stats.generation_tokens
