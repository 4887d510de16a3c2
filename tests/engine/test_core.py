"""EngineCore: what clients may send, ends, aborts, failures, counters."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits
from chorale.errors import ConfigError, EngineError
from tests.support.engine.fake_executor import FakeExecutor
from tests.support.engine.integrity import check_integrity
from tests.support.engine.recording import DEFAULTS, Engine, ends, tokens_by_choice


@pytest.mark.parametrize(
    ("prompt", "fields", "part"),
    [
        ([], {}, "empty"),
        ([-1], {}, "outside"),
        ([1000], {}, "outside"),
        ([1] * 200, {}, "max_model_len"),
        ([1] * 199, {}, "KV cache"),
        ([1], {"n": 0}, "n must be"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"repetition_penalty": float("inf")}, "repetition_penalty"),
        ([1], {"logprobs": 21}, "logprobs"),
        ([1], {"max_tokens": -1}, "max_tokens"),
        ([1], {"min_tokens": 2**40}, "min_tokens"),
        ([1], {"logit_bias": {1000: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {1: float("-inf")}}, "logit_bias"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids"),
        ([1], {"allowed_token_ids": ()}, "allowed_token_ids"),
        ([1], {"allowed_token_ids": (5, 1000)}, "allowed_token_ids"),
        ([1], {"bad_words": ((5,), ())}, "bad_words"),
        ([1], {"bad_words": ((5,), (1000, 6))}, "bad_words"),
        ([1] * 200, {"n": 3}, "max_model_len"),
    ],
)
def test_a_request_that_cannot_be_served_ends_with_an_error_for_each_choice(
    prompt: list[int], fields: dict[str, Any], part: str
) -> None:
    engine = Engine(num_blocks=40)
    engine.add("a", prompt, **fields)
    assert engine.core.has_work
    chunks = engine.run()
    assert [chunk.index for chunk in chunks] == list(range(max(1, fields.get("n", 1))))
    for chunk in chunks:
        assert chunk.finish_reason == "error"
        assert part in (chunk.error or "")
    assert engine.plans == []


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = Engine()
    engine.add("a", 3, max_tokens=2)
    engine.add("a", 3, max_tokens=2)
    chunks = engine.run()
    assert sorted(reason for _, _, reason in ends(chunks)) == ["error", "length"]
    engine.add("a", 3, max_tokens=2)
    assert ends(engine.run()) == [("a", 0, "length")]


@pytest.mark.parametrize(
    "name", ["num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"]
)
def test_limits_that_cannot_work_are_named(name: str) -> None:
    limits = EngineLimits(**(DEFAULTS | {name: 0}))
    with pytest.raises(ConfigError, match=name):
        EngineCore(limits, FakeExecutor(EngineLimits(**DEFAULTS)))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_abort_at_any_moment_ends_all_choices_once_and_frees_everything(depth: int, steps: int) -> None:
    engine = Engine(async_scheduling=depth, max_num_batched_tokens=8)
    engine.add("a", 20, n=3, max_tokens=30)
    engine.add("b", [3] * 5, max_tokens=5)
    chunks = [chunk for _ in range(steps) for chunk in engine.step()]
    engine.core.abort("a")
    check_integrity(engine.core)
    engine.core.abort("a")
    engine.core.abort("unknown")
    for index in (1, -1):
        engine.core.abort("b", index)
    assert engine.core.stats().kv_blocks_used <= 10
    chunks += engine.run()
    assert [end for end in ends(chunks) if end[0] == "a"] == [("a", i, "abort") for i in range(3)]
    assert len(tokens_by_choice(chunks)["b", 0]) == 5
    assert engine.core.stats().kv_blocks_used == 0


def test_an_aborted_id_can_be_used_again_while_its_row_is_in_flight() -> None:
    engine = Engine(async_scheduling=1)
    engine.add("a", 6, max_tokens=9)
    for _ in range(3):
        engine.step()
    engine.core.abort("a")
    request = engine.add("a", [5] * 6, max_tokens=9)
    chunks = engine.run()
    assert ends(chunks) == [("a", 0, "abort"), ("a", 0, "length")]
    want, _ = engine.model.generate(request.prompt_token_ids, request.sampling, 1, 200)
    assert tokens_by_choice(chunks)["a", 0] == want


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_a_failed_step_ends_everything_and_leaves_an_engine_that_works(depth: int, fail_at: int) -> None:
    engine = Engine(async_scheduling=depth, fail_at_step=fail_at, max_num_seqs=2)
    for name in "abc":
        engine.add(name, 9, n=2, max_tokens=12)
    chunks = [chunk for _ in range(fail_at) for chunk in engine.step()]
    if depth == 1:  # the result of a step is awaited after the next one was handed over
        chunks += engine.step()
    with pytest.raises(EngineError, match="the fake device failed"):
        engine.step()
    check_integrity(engine.core)
    chunks += engine.core.take_chunks()
    assert sorted(ends(chunks)) == [(name, index, "error") for name in "abc" for index in range(2)]
    assert all("failed" in (chunk.error or "") for chunk in chunks if chunk.finish_reason)
    assert not engine.core.has_work
    assert engine.core.stats().kv_blocks_used == 0
    engine.add("d", 9, max_tokens=3)
    after = engine.run()
    assert ends(after) == [("d", 0, "length")]
    assert after[0].num_cached_tokens == 0


def test_an_executor_that_raises_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.add("a", 3)

    def broken(plan: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.executor, "execute", broken)
    with pytest.raises(EngineError, match="RuntimeError: out of memory"):
        engine.step()
    assert ends(engine.core.take_chunks()) == [("a", 0, "error")]


def test_stop_ids_end_with_the_stop_token_and_min_tokens_delays_them() -> None:
    engine = Engine(stop_probability=1.0)
    engine.add("eos", 3, ignore_eos=False)
    engine.add("own", 3, stop_token_ids=(44,))
    engine.add("late", 3, ignore_eos=False, min_tokens=4)
    engine.add("never", 3, max_tokens=6)
    chunks = engine.run()
    last = {chunk.request_id: chunk for chunk in chunks if chunk.finish_reason}
    outputs = tokens_by_choice(chunks)
    assert (outputs["eos", 0], last["eos"].stop_token_id) == ([7], 7)
    assert (outputs["own", 0], last["own"].stop_token_id) == ([44], 44)
    assert (len(outputs["late", 0]), last["late"].finish_reason) == (5, "stop")
    assert 7 not in outputs["late", 0][:4]
    assert (len(outputs["never", 0]), last["never"].finish_reason) == (6, "length")


def test_row_starts_name_every_id_that_would_stop() -> None:
    engine = Engine()
    engine.add("a", 3, ignore_eos=False, stop_token_ids=(44,), max_tokens=1)
    engine.add("b", 3, stop_token_ids=(44,), max_tokens=1)
    engine.run()
    assert [start.eos_token_ids for start in engine.plans[0].starts] == [(7, 44), (44,)]


def test_max_tokens_0_computes_the_prompt_and_returns_no_token() -> None:
    engine = Engine()
    engine.add("a", 20, max_tokens=0, prompt_logprobs=0)
    (chunk,) = engine.run()
    assert (chunk.token_ids, chunk.finish_reason) == ([], "length")
    assert chunk.prompt_logprobs is not None
    assert len(chunk.prompt_logprobs) == 20
    assert engine.core.stats().generation_tokens == 0


def test_unseeded_requests_get_seeds_that_a_restart_repeats() -> None:
    seeds = []
    for engine_seed in (0, 0, 1):
        engine = Engine(seed=engine_seed)
        for name in "ab":
            engine.add(name, 3, seed=None, n=2, max_tokens=1)
        engine.run()
        seeds.append([start.seed for plan in engine.plans for start in plan.starts])
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == 4
    assert all(0 <= seed < 2**63 for seed in seeds[0])


def test_timings_ascend_and_arrival_is_the_clients() -> None:
    engine = Engine()
    engine.add("a", 3, max_tokens=3, arrival_time=0.5)
    timings = engine.run()[-1].timings
    assert timings is not None
    assert timings.arrival == 0.5
    assert timings.arrival < timings.first_scheduled < timings.first_token < timings.last_token


def test_stats_count_requests_tokens_and_blocks() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", 6, n=2, max_tokens=3)
    engine.add("b", 5, max_tokens=2)
    engine.step()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 2)
    assert (stats.kv_blocks_used, stats.kv_blocks_total) == (4, 64)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.last_step_tokens) == (6, 1, 6)
    engine.run()
    stats = engine.core.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (11, 8)
    assert stats.num_steps == len(engine.plans) == 8


def test_stats_tell_cached_computed_and_recomputed_prompt_tokens() -> None:
    """Blocks of 4 tokens. What is cached, computed and computed again is known for every prompt here."""
    engine = Engine(num_blocks=200, block_size=4, sliding_window=8, max_num_batched_tokens=64)

    def after(name: str, prompt: list[int]) -> tuple[int, int, int]:
        engine.add(name, prompt, max_tokens=1)
        engine.run()
        stats = engine.core.stats()
        return stats.prompt_tokens, stats.cached_prompt_tokens, stats.recomputed_prompt_tokens

    prompt = [1 + i % 90 for i in range(24)]
    assert after("a", prompt) == (24, 0, 0)
    assert after("b", prompt) == (48, 20, 4)  # the last block is there, but its last token's logits are not
    assert after("c", [*prompt, 7]) == (73, 44, 4)  # six whole blocks, one token computed
    assert after("d", prompt[:22]) == (95, 64, 4)  # five whole blocks
    assert after("e", [91] * 24) == (119, 64, 4)


def test_stats_tell_waiting_from_deferred_requests() -> None:
    engine = Engine(max_num_seqs=2, max_num_batched_tokens=8)
    engine.add("a", 20, n=3, max_tokens=4)
    engine.add("b", 5, max_tokens=4)
    engine.add("c", 5, max_tokens=4)
    engine.step()  # a prefix of "a" alone; its siblings wait for it
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (1, 4, 2)
    engine.run()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (0, 0, 0)


# --------------------------------------------------------------------------- what a router adds up

FEW_ROWS = {"num_blocks": 200, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 400}


def test_prompt_tokens_left_counts_prompts_until_they_are_computed() -> None:
    engine = Engine(**FEW_ROWS)
    engine.add("a", [1] * 40, max_tokens=20)
    engine.add("b", [2] * 30, max_tokens=20, num_expected_cached=28)
    assert engine.core.stats().prompt_tokens_left == 42
    engine.step()  # 16 of the first
    assert engine.core.stats().prompt_tokens_left == 26
    engine.core.abort("b")
    assert engine.core.stats().prompt_tokens_left == 24
    engine.step()
    engine.step()
    assert engine.core.stats().prompt_tokens_left == 0
    assert engine.core.stats().num_running == 1
    engine.add("c", [3] * 10, max_tokens=20, num_expected_cached=10)  # the last token is always computed
    assert engine.core.stats().prompt_tokens_left == 1
    engine.run()
    assert engine.core.stats().prompt_tokens_left == 0


def test_siblings_share_what_is_left_of_their_prompt() -> None:
    engine = Engine(**FEW_ROWS)
    engine.add("a", 16, n=3, max_tokens=20)
    assert engine.core.stats().prompt_tokens_left == 16
    engine.step()
    assert engine.core.stats().prompt_tokens_left <= 2  # the other choices compute a token each
    engine.run()
    assert engine.core.stats().prompt_tokens_left == 0
