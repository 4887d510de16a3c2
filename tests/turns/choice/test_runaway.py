"""Turns that do not come to an end by themselves: each is bounded, and says so."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorale.client.base import EngineInfo
from chorale.engine.types import SamplingSpec
from chorale.turns.choice.runaway import (
    LOOP_PERIOD,
    LOOP_TOKENS,
    MAX_ANALYSIS,
    MAX_MESSAGES,
    MAX_SAME_CALLS,
    MAX_SAME_RESULTS,
    CallWatch,
    RoundWatch,
    is_periodic,
)
from chorale.turns.compaction import MAX_TOKENS, most_tokens, sampling_of_pass
from chorale.turns.events import Fold
from tests.support.engine.scripted_client import ScriptedClient
from tests.support.scripted import ANALYSIS, FINAL, NEXT, PREAMBLE, call, ids, in_rounds, playing, turn
from tests.support.server import VOCAB

ANSWER = "So be it.<|return|>"


def one(client: ScriptedClient, **options: Any) -> Fold:
    return asyncio.run(turn(client, **options))[0]


def thoughts(number: int) -> str:
    return NEXT.join(f"{ANALYSIS}thought {i}" for i in range(number))


def test_reasoning_messages_are_bounded_and_the_answer_is_forced() -> None:
    client = in_rounds(thoughts(1000), ANSWER)
    fold = one(client, sampling=SamplingSpec(max_tokens=100_000))
    assert fold.ended.reason == "stop"
    assert [item.kind for item in fold.items] == ["reasoning"] * MAX_ANALYSIS + ["message"]
    assert fold.text("message") == "So be it."
    prompt = VOCAB.decode(client.requests[1].prompt_token_ids)
    assert prompt.endswith(f"thought {MAX_ANALYSIS - 1}{NEXT}{FINAL}")
    assert client.requests[0].request_id in client.aborted  # the engine does not go on with the first round
    allowed = one(playing(thoughts(MAX_ANALYSIS) + NEXT + FINAL + ANSWER))
    assert (allowed.ended.reason, len(allowed.items)) == ("stop", MAX_ANALYSIS + 1)


@pytest.mark.parametrize("message", [f"{PREAMBLE}Wait.", f"{FINAL}Done."])
def test_other_messages_are_bounded_and_end_as_incomplete(message: str) -> None:
    fold = one(playing(NEXT.join([message] * 1000)))
    assert fold.ended.reason == "length"
    assert len(fold.items) == MAX_MESSAGES


def test_reasoning_that_repeats_itself_is_cut_and_the_answer_forced() -> None:
    client = in_rounds(ANALYSIS + "Once. " + "and so on and on " * 5000, ANSWER)
    fold = one(client, sampling=SamplingSpec(max_tokens=100_000))
    assert [(item.kind, item.status) for item in fold.items] == [
        ("reasoning", "incomplete"),
        ("message", "completed"),
    ]
    assert fold.items[0].text.startswith("Once. and so on")
    assert len(fold.items[0].content_token_ids) < LOOP_TOKENS + 600
    assert fold.ended.reason == "stop"
    assert len(client.requests[1].prompt_token_ids) < 20  # what was repeated is not read again


def test_an_answer_may_repeat_itself() -> None:
    text = "ha " * 4000
    fold = one(playing(FINAL + text + "<|return|>"))
    assert fold.text("message") == text
    fold = one(playing(call("f", "1, " * 4000) + "<|call|>"), functions=["f"])
    assert fold.ended.reason == "tool_calls"


def test_a_request_with_ignore_eos_gets_all_its_tokens() -> None:
    text = ANALYSIS + "on and " * 4000
    fold = one(playing(text), ignore_eos=True)
    assert len(fold.ended.output_token_ids) == len(ids(text))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(2, 40))
def test_a_pattern_is_found_wherever_it_was_cut(pattern: list[int], times: int) -> None:
    tokens = (pattern * times)[: len(pattern) * times - len(pattern) // 2]
    assert len(tokens) < 2 or is_periodic(tokens, len(pattern))
    assert not is_periodic([*tokens, 9], min(len(pattern), len(tokens)))


def test_a_long_period_is_no_loop() -> None:
    assert not is_periodic(list(range(LOOP_PERIOD + 1)) * 20, LOOP_PERIOD)
    watch = RoundWatch()
    assert not watch.loops([1] * (LOOP_TOKENS - 1), 0)
    assert watch.loops([1] * LOOP_TOKENS, 0)
    assert not RoundWatch().loops([1] * LOOP_TOKENS, 1)  # of this round only


def test_equal_calls_are_counted_by_their_results() -> None:
    watch = CallWatch()
    for _ in range(MAX_SAME_RESULTS):
        assert not watch.repeats
        watch.called("python", "1 + 1", "2")
    assert watch.repeats
    watch.called("python", "2 + 2", "4")
    assert not watch.repeats
    for number in range(MAX_SAME_RESULTS):  # as that of each call which changes something
        assert not watch.repeats
        watch.called("python", f"x = {number}", "[no output]")
    assert not watch.repeats
    for number in range(MAX_SAME_CALLS):  # as if something was waited for
        assert not watch.repeats
        watch.called("mcp.status", "{}", str(number))
    assert watch.repeats


def test_the_checkpoints_default_bounds_a_summary() -> None:
    info = EngineInfo(model="m", max_model_len=131072, max_num_seqs=4)
    small = msgspec.structs.replace(info, default_sampling={"max_new_tokens": 300.0})
    spec = SamplingSpec(max_tokens=5)  # the limit of the request does not apply to its summary
    for each, expected in ((info, MAX_TOKENS), (small, 300)):
        assert most_tokens(each) == sampling_of_pass(spec, each, 1000).max_tokens == expected
