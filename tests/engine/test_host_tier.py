"""The tier of host memory in simulations: every page that returns holds what its tokens say, whatever
happens around it. ``FakeExecutor`` keeps the content of blocks and slots, and loads end when they like."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Literal

import pytest

from chorale.engine.types import CacheGroup, EngineLimits
from chorale.errors import EngineError
from tests.engine.test_simulation import tight_limits
from tests.support.engine.recording import Engine, tokens_by_choice
from tests.support.engine.simulation import simulate

CASES = [
    pytest.param(depth, block_size, slots, marks=() if (depth, slots) in short else pytest.mark.slow)
    for block_size, short in ((1, {(1, 9)}), (7, {(0, 60), (1, 60)}), (16, {(1, 9), (0, 9)}))
    for depth in (0, 1)
    for slots in (9, 60)
]


def with_tier(limits: EngineLimits, num_slots: int) -> EngineLimits:
    most = max(1, limits.max_num_batched_tokens // limits.block_size)
    return replace(limits, num_host_slots=num_slots, max_saved_pages=most, page_bytes=10)


@pytest.mark.parametrize(("depth", "block_size", "slots"), CASES)
def test_every_request_gets_the_tokens_it_would_get_alone(
    depth: Literal[0, 1], block_size: int, slots: int
) -> None:
    """Arrivals, aborts, preemptions, priorities, over hosts that hold little: loads of all kinds.

    Two engines, more if little was loaded.
    """
    hits = 0
    for seed in range(6):
        if seed >= 2 and hits > 20:
            break
        rng = random.Random(f"{depth}{block_size}{seed}")
        limits = tight_limits(rng, depth, True, block_size, "priority" if seed % 2 else "fcfs")
        life = simulate(with_tier(limits, slots * 16 // block_size), 60, seed)
        stats = life.core.stats()
        hits += stats.host_cache_hits
        assert stats.host_cache_hits <= stats.host_cache_queries
        assert stats.host_bytes_loaded <= stats.num_host_loads * limits.num_blocks * 10
    assert hits > 20, "no load: the test says nothing"


def conversation(number: int, length: int) -> list[int]:
    return [1 + (number * 1000 + place * 7) % 290 for place in range(length)]


class Talk(Engine):
    """An engine whose device holds one of the conversations, and whose host holds many."""

    def __init__(self, **changes: Any) -> None:
        tier = {"num_host_slots": 200, "max_saved_pages": 40, "page_bytes": 10, "max_num_batched_tokens": 64}
        super().__init__(**({"num_blocks": 40} | tier | changes))

    def say(self, number: int, length: int = 100, **fields: Any) -> tuple[list[int], int]:
        """Returns the tokens of the answer, and how many of the prompt were cached."""
        name = f"c{len(self.plans)}"
        self.add(name, conversation(number, length), max_tokens=2, **fields)
        chunks = self.run()
        return tokens_by_choice(chunks)[name, 0], chunks[0].num_cached_tokens

    def displace(self, length: int = 100) -> list[int]:
        """Has conversation 0, then five others that take its blocks. Returns the tokens of its answer."""
        first, cached = self.say(0, length)
        assert cached == 0
        for number in range(1, 6):
            self.say(number)
        return first


@pytest.mark.parametrize("overlap", [False, True])
def test_an_evicted_conversation_is_loaded_from_the_host(overlap: bool) -> None:
    """The whole prompt but its last block, in one load; the second time, nothing is copied to the host."""
    talk = Talk(async_scheduling=overlap)
    first = talk.displace()
    again, cached = talk.say(0)
    assert (again, cached) == (first, 96)
    stats = talk.core.stats()
    assert stats.num_host_loads == 1
    assert stats.prefix_cache_hits + stats.host_cache_hits == 96
    assert stats.host_cache_hits > 80
    saved = stats.host_bytes_saved
    talk.say(1)  # displaces conversation 0, of which the host has every page that it loaded
    talk.say(0)
    assert talk.core.stats().host_bytes_saved - saved < 100 * 10


def test_the_cached_part_of_the_prefix_stays_while_the_load_runs() -> None:
    """The device has the first half, which others would evict: one that runs takes all free blocks."""
    talk = Talk(num_blocks=60, max_num_batched_tokens=8)
    talk.displace()
    talk.add("half", conversation(0, 60), max_tokens=1)
    talk.run()
    talk.executor._load_steps = 6
    talk.executor._rng.seed(1)
    talk.add("other", conversation(9, 90), max_tokens=30)
    talk.step()
    talk.add("back", conversation(0, 100), max_tokens=2)
    loads = talk.core.stats().num_host_loads
    chunks = talk.run()
    assert talk.core.stats().num_host_loads == loads + 1
    first = next(chunk for chunk in chunks if chunk.request_id == "back")
    assert first.num_cached_tokens == 96
    (plan,) = [plan for plan in talk.plans[-60:] if plan.transfers and plan.transfers.loads]
    assert len(plan.rows), "the load did not ride on a step of the other request"
    assert 0 < len(plan.transfers.loads[0].blocks) < 20, "the first half was loaded, too"


def test_a_load_counts_as_an_admission() -> None:
    """Another request that would take the blocks that the loaded one still needs waits for it."""
    talk = Talk(num_blocks=64)
    talk.displace(60)
    talk.executor._load_steps = 20
    talk.executor._rng.seed(5)
    talk.add("runs", conversation(8, 20), max_tokens=60)
    talk.step()
    talk.add("back", [*conversation(0, 60), *conversation(30, 70)], max_tokens=2)
    talk.add("later", conversation(20, 120), max_tokens=2)
    chunks = talk.run()
    order = list(dict.fromkeys(chunk.request_id for chunk in chunks))
    assert order == ["runs", "back", "later"]
    assert next(chunk for chunk in chunks if chunk.request_id == "back").num_cached_tokens == 60


def test_an_idle_engine_waits_for_a_load_in_steps_without_rows() -> None:
    talk = Talk()
    talk.displace()
    before = len(talk.plans)
    talk.say(0)
    assert any(not len(plan.rows) for plan in talk.plans[before:])
    assert not any(plan.transfers for plan in talk.plans[:1])


@pytest.mark.parametrize("when", range(5))
def test_an_abort_in_the_middle_of_a_load_gives_everything_back(when: int) -> None:
    talk = Talk()
    talk.displace()
    talk.executor._load_steps = 6
    talk.add("back", conversation(0, 100), max_tokens=2)
    for _ in range(when):
        talk.step()
    talk.core.abort("back")
    talk.run()
    assert talk.core.stats().kv_blocks_used == 0
    assert talk.say(0)[1] == 96


def test_a_failed_step_forgets_the_host_and_the_next_plan_waits_for_loads() -> None:
    talk = Talk()
    first = talk.displace()
    talk.executor._load_steps = 50
    talk.executor._rng.seed(3)
    talk.add("back", conversation(0, 100), max_tokens=2)
    talk.step()
    assert talk.core._engine.loading
    talk.executor._fail_at_step = len(talk.plans)
    with pytest.raises(EngineError, match="the fake device failed"):
        talk.run()
    talk.executor._fail_at_step = None
    stats = talk.core.stats()
    assert (stats.host_pages_used, stats.kv_blocks_used) == (0, 0)
    again, cached = talk.say(0)
    assert (again, cached) == (first, 0)
    finished = [plan.transfers.finished for plan in talk.plans if plan.transfers]
    assert any(finished)


def test_pages_with_bad_logits_are_removed_from_host_memory_and_loads() -> None:
    talk = Talk()
    talk.displace()
    talk.executor._load_steps = 6
    talk.add("back", conversation(0, 100), max_tokens=2)
    talk.step()
    engine = talk.core._engine
    (sequence,) = engine.loading.values()
    engine.invalidate(sequence.block_hashes[3:4])
    assert talk.run()[0].num_cached_tokens <= 12
    for group in CacheGroup:
        assert engine.cache.tier is not None
        assert sequence.block_hashes[3] not in engine.cache.tier.slots.published(group)
    assert talk.say(0)[1] == 96  # what was computed since


def test_a_prompt_that_diverges_anywhere_recomputes_less_than_a_spacing() -> None:
    """One block a window is kept for each 16 windows: 96 tokens here."""
    talk = Talk(num_blocks=120, max_model_len=500, num_host_slots=1000)
    talk.say(0, 400)
    for number in range(1, 8):
        talk.say(number, 400)
    talk.add("fork", [*conversation(0, 300), *conversation(50, 100)], max_tokens=1)
    cached = talk.run()[0].num_cached_tokens
    assert 300 - 96 - 4 <= cached <= 300


@pytest.mark.parametrize("length", range(61, 69))
def test_a_prompt_of_any_length_returns_up_to_its_last_block(length: int) -> None:
    """Its last token is always computed, so a prompt of whole blocks resumes before the last of them."""
    talk = Talk(sliding_window=20)
    talk.displace(length)
    assert talk.say(0, length)[1] == (length - 1) // 4 * 4


def test_choices_share_what_the_leader_loads() -> None:
    talk = Talk(num_blocks=60)
    first = talk.displace()
    found = talk.add("many", conversation(0, 100), max_tokens=2, n=3)
    tokens = tokens_by_choice(talk.run())
    assert tokens[found.request_id, 0] == first
    assert talk.core.stats().num_host_loads == 1


def test_without_a_tier_plans_have_no_transfers() -> None:
    engine = Engine()
    engine.add("a", 20, max_tokens=3)
    engine.run()
    assert all(plan.transfers is None for plan in engine.plans)
