"""The lives of blocks: allocation, prefix hits, and the allocation that evicts the content."""

from __future__ import annotations

import pytest

from chorale.engine.histogram import BLOCK_SECONDS
from chorale.engine.kv_cache import blocks
from chorale.engine.types import CacheGroup
from tests.support.engine.recording import Engine


def test_a_life_has_its_length_its_idle_time_and_its_last_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 10.0, 11.0, 13.0, 17.0, 25.0, 125.0))
    monkeypatch.setattr(blocks, "monotonic", lambda: next(times))
    pool = blocks.ObservedPool(1, share=1.0)
    block = pool.allocate()
    pool.publish(CacheGroup.FULL, b"a", block)
    pool.release(block)
    for _ in range(5):  # the first access is forgotten
        pool.share(block)
        pool.release(block)
    assert pool.allocate() == block
    assert [counts.values[-1] for counts in (pool.lifetimes, pool.idle, pool.gaps)] == [125.0, 100.0, 14.0]
    assert [sum(counts.values[:-1]) for counts in (pool.lifetimes, pool.idle, pool.gaps)] == [1, 1, 3]
    assert pool.lifetimes.values[BLOCK_SECONDS.index(300)] == 1


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 300, 900), (1.0, 950, 5000)])
def test_the_share_decides_how_many_lives_are_observed(share: float, least: int, most: int) -> None:
    engine = Engine(observed_blocks=share, num_blocks=16, max_model_len=40)
    for name in range(100):
        engine.add(str(name), [name] * 8, max_tokens=16)
    engine.run()
    counts = engine.core.stats().block_lifetimes
    assert bool(counts) == (share > 0)
    assert least <= sum(counts[:-1]) <= most


def test_an_iteration_counts_each_prompt_and_output_token_once() -> None:
    engine = Engine(max_num_batched_tokens=16)
    for name in "abc":
        engine.add(name, [ord(name)] * 20, max_tokens=10)
    engine.run()
    engine.add("again", [ord("a")] * 20, max_tokens=10)
    engine.run()
    stats = engine.core.stats()
    *counts, total = stats.step_tokens
    assert stats.cached_prompt_tokens == 16
    assert total == 4 * (20 + 10) - 16
    assert 0 < sum(counts) <= stats.num_steps
