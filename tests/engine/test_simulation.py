"""Simulated requests: each gets the tokens that it would get alone, whatever happens around it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import pytest

from chorale.engine.engine_state import Drafter
from chorale.engine.types import EngineLimits
from tests.support.engine.drafters import Future, Nonsense, Oracle
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


DRAFTERS: dict[str, Callable[[Future], Drafter] | None] = {
    "none": None,
    "right": lambda future: Oracle(future, most=4),
    "some right": lambda future: Oracle(future, most=9, varies=True, wrong=0.3, vocab_size=VOCAB),
    "nonsense": lambda future: Nonsense(VOCAB, 3),
}


def tiny_limits(rng: random.Random) -> EngineLimits:
    """A pool that hardly holds one sequence, and any combination of options."""
    return EngineLimits(
        num_blocks=rng.randint(4, 24),
        block_size=rng.choice((1, 3, 8)),
        max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=rng.randint(1, 20),
        max_model_len=60,
        sliding_window=rng.randint(1, 12),
        enable_prefix_caching=rng.random() < 0.5,
        async_scheduling=rng.random() < 0.5,
        policy=rng.choice(("fcfs", "priority")),
        num_host_slots=rng.choice((0, 3, 40)),
        max_saved_pages=4,
        max_num_active_seqs=rng.choice((0, 1, 2)),
        prefill_interval=rng.choice((1, 3)),
        long_prefill=rng.choice((0, 2)),
        long_prefill_share=rng.random() < 0.5,
        watermark=rng.choice((0.0, 0.01, 0.4)),
        batch_waits=rng.random() < 0.5,
        eos_token_ids=EOS,
        vocab_size=VOCAB,
    )


@pytest.mark.parametrize("drafts", DRAFTERS)
def test_options_change_no_token(drafts: str) -> None:
    for seed in range(8):
        simulate(tiny_limits(random.Random(f"{drafts}{seed}")), 12, seed, DRAFTERS[drafts])
