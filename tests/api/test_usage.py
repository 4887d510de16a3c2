"""Usage of several choices and prompts (a shared prompt is counted once), and metrics of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.api.usage import ShownMetrics, metrics_object, of_choices, of_prompts
from chorale.engine.types import ChunkTimings
from chorale.turns.events import TurnEnded, Usage
from tests.support.local_client import on_fake_device
from tests.support.scripted import events_of
from tests.support.server import VOCAB, served

# The same prompt of 20 tokens, of which the cache had 4 for the first choice and 16 for the second. Each had
# a second round after a tool, with prompts of 5 and 7 further tokens.
COLD = Usage(
    input_tokens=25,
    cached_tokens=7,
    output_tokens=4,
    reasoning_tokens=1,
    later_input_tokens=5,
    later_cached_tokens=3,
)
WARM = Usage(
    input_tokens=27,
    cached_tokens=18,
    output_tokens=6,
    reasoning_tokens=2,
    later_input_tokens=7,
    later_cached_tokens=2,
)


@pytest.mark.parametrize("choices", [(COLD, WARM), (WARM, COLD)], ids=["cold first", "warm first"])
def test_a_prompt_shared_by_choices_is_counted_once(choices: tuple[Usage, Usage]) -> None:
    usage = of_choices(choices)
    assert usage.input_tokens == 20 + 5 + 7
    assert usage.cached_tokens == 4 + 3 + 2  # 4: the fewest cached tokens of the shared prompt
    assert usage.output_tokens == 10
    assert usage.reasoning_tokens == 3


def test_the_usage_of_no_choices_is_zero() -> None:
    assert of_choices([]) == Usage()
    assert of_prompts([]) == Usage()


def test_a_choice_that_never_started_does_not_hide_the_prompt() -> None:
    assert of_choices([COLD, Usage()]).input_tokens == COLD.input_tokens


def test_prompts_are_summed() -> None:
    usage = of_prompts([COLD, WARM])
    assert (usage.input_tokens, usage.cached_tokens) == (52, 25)
    assert (usage.output_tokens, usage.reasoning_tokens) == (10, 3)


STEPS = bytes((4, 4, 4, 0, 2, 1))  # three drafts: their tokens, and the accepted ones


def test_the_metrics_of_drafts_are_vllms() -> None:
    ended = TurnEnded("stop", WARM, timings=ChunkTimings(0, 1, 2, 3, 0, STEPS))
    found = metrics_object(ended, ShownMetrics(times=False, drafts="detailed", most_drafts=4))
    assert found.pop("speculative_decoding") == {
        "mean_acceptance_length": pytest.approx(1 + 5 / 3),
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 0, 0, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 10,
        "num_spec_tokens": 4,
        "per_step_accepted": [4, 0, 1],
        "per_step_drafted": [4, 4, 2],
    }
    assert set(found.values()) == {None}


@pytest.mark.parametrize(("drafts", "most"), [("none", 4), ("detailed", 0)])
def test_drafts_are_null_unless_wanted_and_possible(drafts: str, most: int) -> None:
    ended = TurnEnded("stop", WARM, timings=ChunkTimings(0, 1, 2, 3, 0))
    shown = ShownMetrics(times=True, drafts=drafts, most_drafts=most)  # type: ignore[arg-type]
    found = metrics_object(ended, shown)
    assert found == {
        "time_to_first_token_ms": 1000,
        "generation_time_ms": 1000,
        "queue_time_ms": 1000,
        "mean_itl_ms": 200,
        "tokens_per_second": 3,
        "speculative_decoding": None,
    }
    assert not ShownMetrics(times=False, drafts=drafts, most_drafts=most).any  # type: ignore[arg-type]


async def test_an_answer_of_one_choice_has_metrics_if_enabled() -> None:
    async with on_fake_device() as client, served(client, request_metrics=True) as server:
        fields: dict[str, Any] = {"ignore_eos": True, "allowed_token_ids": VOCAB.encode("a b"), "seed": 5}
        short = {**fields, "max_tokens": 30}
        streamed = {**short, "stream": True, "stream_options": {"include_usage": True}}
        answers = [
            (await server.chat(**short)).json(),
            (await server.complete(**short)).json(),
            (await server.complete(**fields, stop="a ba", max_tokens=900)).json(),
            events_of(await server.chat(**streamed))[-1],
            events_of(await server.complete(**streamed))[-1],
            await server.respond(input="hi", max_output_tokens=30),
        ]
        for answer in answers:
            count = answer["usage"].get("completion_tokens") or answer["usage"]["output_tokens"]
            metrics = answer["metrics"]
            seconds = (metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]) / 1000
            assert metrics["tokens_per_second"] * seconds == pytest.approx(count)
            assert metrics["mean_itl_ms"] * (count - 1) == pytest.approx(metrics["generation_time_ms"])
            assert min(metrics["queue_time_ms"], metrics["generation_time_ms"]) > 0
        assert answers[2]["choices"][0]["stop_reason"] == "a ba"
        assert "metrics" not in (await server.complete(["a", "b"], **short)).json()
        assert "metrics" not in (await server.chat(n=2, **short)).json()
