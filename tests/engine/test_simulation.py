"""Simulated requests: each gets the tokens that it would get alone, whatever happens around it."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from chorale.engine.types import EngineLimits
from tests.support.engine.simulation import EOS, VOCAB, simulate

NUM_REQUESTS = 70  # of each engine

# With each depth one block size; the others are marked slow.
CASES = [
    pytest.param(depth, caching, block_size, marks=() if block_size in short else pytest.mark.slow)
    for depth, short in ((0, (16,)), (1, (7,)))
    for caching in (False, True)
    for block_size in (1, 7, 16, 64)
]


def tight_limits(
    rng: random.Random,
    depth: Literal[0, 1],
    caching: bool,
    block_size: int,
    policy: Literal["fcfs", "priority"],
) -> EngineLimits:
    """A pool that holds a few long sequences, so that preemption is part of the day."""
    return EngineLimits(
        num_blocks=rng.randint(140, 260) // block_size + 4,
        block_size=block_size,
        max_num_seqs=rng.randint(3, 12),
        max_num_batched_tokens=rng.choice((5, 16, 64)),
        max_model_len=rng.choice((100, 130)),
        sliding_window=rng.choice((1, 5, 16, 33)),
        enable_prefix_caching=caching,
        policy=policy,
        async_scheduling=depth,
        eos_token_ids=EOS,
        vocab_size=VOCAB,
        routed_experts=(2, 4),
    )


@pytest.mark.parametrize(("depth", "caching", "block_size"), CASES)
def test_every_request_gets_the_tokens_it_would_get_alone(
    depth: Literal[0, 1], caching: bool, block_size: int
) -> None:
    """Three engines, more if few rows were preempted: two policies, random sizes. A failure replays from its
    seed."""
    preemptions = hits = 0
    for seed in range(6):
        if seed >= 3 and preemptions > 10:
            break
        rng = random.Random(f"{depth}{caching}{block_size}{seed}")
        limits = tight_limits(rng, depth, caching, block_size, "priority" if seed % 2 else "fcfs")
        life = simulate(limits, NUM_REQUESTS, seed)
        preemptions += life.core.stats().num_preemptions
        hits += life.core.stats().prefix_cache_hits
    assert preemptions > 10, "no block pressure: the test says nothing about preemption"
    assert (hits > 0) == caching
