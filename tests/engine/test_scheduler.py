"""What a step computes: budget, order, chunks, prefix hits, preemption, priorities."""

from __future__ import annotations

import random

import pytest

from chorale.config.seeds import choice_seed
from chorale.engine.types import StepPlan
from tests.support.engine.recording import Engine, ends, tokens_by_choice


def shape(plan: StepPlan) -> list[tuple[int, int, bool]]:
    """(computed, new, samples) of each entry."""
    return list(zip(plan.num_computed.tolist(), plan.num_new.tolist(), plan.samples.tolist(), strict=True))


def test_a_long_prompt_is_chunked_by_the_budget_and_samples_once() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("a", 40, max_tokens=2)
    engine.run()
    assert [shape(plan) for plan in engine.plans] == [
        [(0, 16, False)],
        [(16, 16, False)],
        [(32, 8, True)],
        [(40, 1, True)],
    ]


def test_decodes_come_first_then_prefills_then_admissions() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("a", 4, max_tokens=20)
    engine.step()
    engine.add("b", [1] * 20, max_tokens=2)
    engine.add("c", [2] * 20, max_tokens=2)
    engine.step()
    assert shape(engine.plans[-1]) == [(4, 1, True), (0, 15, False)]
    engine.step()
    assert shape(engine.plans[-1]) == [(5, 1, True), (15, 5, True), (0, 10, False)]


def test_more_decodes_than_budget_serves_the_earliest() -> None:
    engine = Engine(max_num_batched_tokens=2)
    for name in "abc":
        engine.add(name, 1, max_tokens=4)
    chunks = engine.run()
    assert all(plan.num_tokens <= 2 for plan in engine.plans)
    assert [name for name, _, _ in ends(chunks)] == ["a", "b", "c"]


def test_async_scheduling_drops_the_result_of_a_finished_row() -> None:
    engine = Engine(async_scheduling=1, stop_probability=1.0)
    engine.add("a", 5, ignore_eos=False, max_tokens=10)
    chunks = engine.run()
    assert tokens_by_choice(chunks)["a", 0] == [7]
    assert ends(chunks) == [("a", 0, "stop")]
    assert [plan.num_tokens for plan in engine.plans] == [5, 1]  # the second was in flight already


def test_second_request_hits_the_prefix_of_the_first() -> None:
    engine = Engine()
    prompt = list(range(100, 121))
    engine.add("a", prompt, max_tokens=2)
    engine.run()
    engine.add("b", prompt, max_tokens=2)
    chunks = engine.run()
    assert chunks[0].num_cached_tokens == 20
    assert shape(engine.plans[2])[0] == (20, 1, True)
    stats = engine.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (42, 20)
    assert stats.prompt_tokens == 42


def test_output_is_found_by_the_next_turn() -> None:
    engine = Engine()
    engine.add("a", 9, max_tokens=12)
    output = tokens_by_choice(engine.run())["a", 0]
    engine.add("b", [*range(10, 19), *output, 500], max_tokens=1)
    assert engine.run()[0].num_cached_tokens == 20  # the last of 21 tokens was never computed


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_choices_share_the_prompt_and_have_different_seeds(caching: bool, depth: int) -> None:
    engine = Engine(enable_prefix_caching=caching, async_scheduling=depth)
    request = engine.add("a", 21, n=3, max_tokens=6)
    outputs = tokens_by_choice(engine.run())
    for index in range(3):
        seed = choice_seed(1, index)
        want, _ = engine.model.generate(request.prompt_token_ids, request.sampling, seed, 200)
        assert outputs["a", index] == want
    prompt_tokens = [shape(plan)[entry][1] for plan in engine.plans for entry in range(len(plan.rows))]
    assert sum(prompt_tokens) == 21 + 2 * 1 + 3 * 5
    if not caching:  # nothing of it is left for others
        engine.add("b", 21, max_tokens=1)
        assert engine.run()[0].num_cached_tokens == 0


def test_preempted_sequences_return_complete_and_in_order() -> None:
    engine = Engine(num_blocks=16, max_model_len=40)
    for name in "abc":
        engine.add(name, [ord(name)] * 8, max_tokens=16)
    chunks = engine.run()
    assert engine.core.stats().num_preemptions > 0
    assert [name for name, _, _ in ends(chunks)] == ["a", "b", "c"]
    timings = {chunk.request_id: chunk.timings for chunk in chunks if chunk.timings}
    assert timings["a"].num_preemptions == 0
    assert sum(t.num_preemptions for t in timings.values()) == engine.core.stats().num_preemptions


def test_a_sequence_ends_where_the_pool_ends() -> None:
    engine = Engine(num_blocks=12)
    capacity = engine.core._engine.cache.capacity
    request = engine.add("a", 10, max_tokens=100)
    chunks = engine.run()
    assert ends(chunks) == [("a", 0, "length")]
    assert len(tokens_by_choice(chunks)["a", 0]) == capacity - 10
    assert (
        tokens_by_choice(chunks)["a", 0]
        == engine.model.generate(request.prompt_token_ids, request.sampling, 1, capacity)[0]
    )


def test_max_model_len_is_the_last_length() -> None:
    engine = Engine(max_model_len=20)
    engine.add("a", 19)
    engine.add("b", 5)
    outputs = tokens_by_choice(engine.run())
    assert (len(outputs["a", 0]), len(outputs["b", 0])) == (1, 15)


def test_priority_orders_the_queue_and_fcfs_ignores_it() -> None:
    for policy, order in (("priority", ["b", "c", "a"]), ("fcfs", ["a", "b", "c"])):
        engine = Engine(policy=policy, max_num_seqs=1)
        for name, priority in (("a", 5), ("b", 0), ("c", 0)):
            engine.add(name, 3, max_tokens=2, priority=priority)
        assert [name for name, _, _ in ends(engine.run())] == order


@pytest.mark.parametrize("depth", [0, 1])
def test_an_urgent_request_takes_a_row(depth: int) -> None:
    engine = Engine(policy="priority", max_num_seqs=1, async_scheduling=depth)
    engine.add("slow", 3, max_tokens=20, priority=1)
    for _ in range(3):
        engine.step()
    engine.add("equal", 3, max_tokens=2, priority=1)
    engine.add("urgent", 3, max_tokens=2, priority=0)
    assert [name for name, _, _ in ends(engine.run())] == ["urgent", "slow", "equal"]
    assert engine.core.stats().num_preemptions == 1


def test_equal_priority_preempts_not_even_a_later_request() -> None:
    """A choice that waited for its sibling's prompt is older than a request that began meanwhile."""
    engine = Engine(policy="priority", max_num_seqs=2)
    engine.add("pair", 60, n=2, max_tokens=4, priority=1)
    engine.add("later", 3, max_tokens=30, priority=1)
    engine.run()
    assert engine.core.stats().num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_an_urgent_request_takes_blocks(depth: int) -> None:
    engine = Engine(policy="priority", num_blocks=16, max_model_len=40, async_scheduling=depth)
    engine.add("slow", [1] * 24, max_tokens=14, priority=1)
    for _ in range(3):
        engine.step()
    engine.add("urgent", [2] * 24, max_tokens=2, priority=0)
    assert [name for name, _, _ in ends(engine.run())] == ["urgent", "slow"]
    assert engine.core.stats().num_preemptions == 1


def test_nobody_is_preempted_for_an_urgent_request_that_would_still_not_fit() -> None:
    engine = Engine(policy="priority", num_blocks=20, max_model_len=60)
    engine.add("first", [1] * 24, max_tokens=12, priority=0)
    engine.add("slow", [2] * 8, max_tokens=5, priority=1)
    for _ in range(3):
        engine.step()
    engine.add("urgent", [3] * 48, max_tokens=2, priority=0)
    assert [name for name, _, _ in ends(engine.run())] == ["slow", "first", "urgent"]
    assert engine.core.stats().num_preemptions == 0


def test_admission_waits_for_room_for_the_whole_sequence() -> None:
    """Under fcfs a newcomer never preempts, and is not let in to be preempted."""
    engine = Engine(num_blocks=16, max_model_len=40)
    engine.add("a", [1] * 20, max_tokens=3)
    engine.add("b", [2] * 30, max_tokens=3)
    engine.run()
    assert engine.core.stats().num_preemptions == 0


def test_blocks_of_window_layers_are_given_back_as_the_sequence_moves() -> None:
    engine = Engine(enable_prefix_caching=False, num_blocks=100)
    engine.add("a", 4, max_tokens=150)
    for _ in range(100):
        engine.step()
    full = -(-104 // 4)
    assert full + 2 <= engine.core.stats().kv_blocks_used <= full + 3


def test_admissions_leave_room_so_that_running_requests_are_seldom_preempted() -> None:
    """Short prompts, long outputs, a pool that cannot hold them all: 67 with the room, 82 without."""
    engine = Engine(num_blocks=1000, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=2000)
    draw = random.Random(1)
    for number in range(120):
        prompt = [draw.randrange(10, 900) for _ in range(draw.randrange(8, 20))]
        engine.add(str(number), prompt, max_tokens=draw.randrange(60, 140))
    engine.run()
    assert 0 < engine.core.stats().num_preemptions < 75


# --------------------------------------------------------------------------- limits of the operator


def test_fewer_sequences_than_rows_may_run() -> None:
    engine = Engine(max_num_seqs=4, max_num_active_seqs=2)
    for name in "abcd":
        engine.add(name, 3, max_tokens=3)
    chunks = engine.run()
    assert max(len(plan.rows) for plan in engine.plans) == 2
    assert sorted(name for name, _, _ in ends(chunks)) == ["a", "b", "c", "d"]


def test_a_better_priority_takes_a_place_although_rows_are_free() -> None:
    engine = Engine(max_num_seqs=4, max_num_active_seqs=1, policy="priority")
    engine.add("a", 3, max_tokens=10, priority=1)
    engine.step()
    engine.add("b", 3, max_tokens=2, priority=0)
    assert [name for name, _, _ in ends(engine.run())] == ["b", "a"]
    assert max(len(plan.rows) for plan in engine.plans) == 1


@pytest.mark.parametrize(("share", "chunks"), [(False, [8, 8, 4]), (True, [15, 5])])
def test_a_long_prompt_beside_others_gets_few_tokens_of_a_step(share: bool, chunks: list[int]) -> None:
    engine = Engine(max_num_batched_tokens=30, long_prefill=8, long_prefill_share=share)
    engine.add("a", [1] * 20, max_tokens=1)
    engine.step()
    assert shape(engine.plans[-1]) == [(0, 20, True)]  # it is alone
    engine.run()
    engine.add("b", 2, max_tokens=20)
    engine.step()
    first = len(engine.plans)
    engine.add("c", [3] * 20, max_tokens=1)
    for _ in chunks:
        engine.step()
    assert [int(plan.num_new[1]) for plan in engine.plans[first : first + len(chunks)]] == chunks


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_run_in_every_third_step_while_streams_run(depth: int) -> None:
    engine = Engine(prefill_interval=3, max_num_batched_tokens=16, async_scheduling=depth)
    engine.add("a", 4, max_tokens=30)
    engine.step()
    engine.add("b", [2] * 40, max_tokens=2)
    engine.run()
    with_prompts = [step for step, plan in enumerate(engine.plans) if (plan.num_new > 1).any()]
    assert with_prompts == [0, 3, 6, 9]


def test_a_queue_is_served_although_the_interval_has_not_passed() -> None:
    engine = Engine(prefill_interval=5, max_num_batched_tokens=9)
    engine.add("a", 4, max_tokens=40)
    engine.step()
    for name in "bcd":
        engine.add(name, [ord(name)] * 8, max_tokens=1)
    engine.run()
    with_prompts = [step for step, plan in enumerate(engine.plans) if (plan.num_new > 1).any()]
    assert with_prompts == [0, 5, 6, 7]


@pytest.mark.parametrize(("watermark", "most"), [(0.0, 2), (0.5, 1)])
def test_admissions_leave_the_watermark_free(watermark: float, most: int) -> None:
    engine = Engine(num_blocks=32, max_model_len=40, watermark=watermark, enable_prefix_caching=False)
    for name in "ab":
        engine.add(name, [ord(name)] * 24, max_tokens=1)
    engine.run()
    assert max(len(plan.rows) for plan in engine.plans) == most
