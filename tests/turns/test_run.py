"""Turns over scripted token streams: routing, ends, usage, repairs; the grammar of a turn is made once."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.config.seeds import choice_seed
from chorale.engine.types import SamplingSpec, TokenChunk
from chorale.grammar.constraint import Constraint
from chorale.turns import rules
from chorale.turns.events import Fold, ItemClosed, ItemDelta, ItemOpened, TurnEnded
from tests.support.event_loop import run
from tests.support.scripted import (
    ANALYSIS,
    FINAL,
    NEXT,
    batches,
    call,
    changing,
    ids,
    in_rounds,
    playing,
    turn,
)
from tests.support.server import served


def one(text: str, **options: object) -> Fold:
    names = ("tokens_per_step", "finish_reason", "with_logprobs")
    script = {name: options.pop(name) for name in names if name in options}
    return run(turn(playing(text, **script), **options))[0]


def shape(fold: Fold) -> list[tuple[str, str | None, str, str | None]]:
    return [(i.kind, i.opened.name or i.opened.phase, i.text, i.status) for i in fold.items]


def test_a_call_of_an_undeclared_function_is_text() -> None:
    fold = one(call("g", '{"a":1}') + "<|call|>", functions=["f"])
    assert shape(fold) == [("message", "commentary", '{"a":1}', "completed")]
    assert (fold.ended.reason, fold.ended.repairs) == ("stop", {"undeclared_recipient": 1})


def test_an_answer_is_forced_after_bare_analysis() -> None:
    client = in_rounds(ANALYSIS + "Think.<|return|>", "The answer.<|return|>")
    sampling = SamplingSpec(max_tokens=50, seed=7, min_tokens=3, grammar="g")
    fold = run(turn(client, prompt=[1, 2, 3], sampling=sampling))[0]
    assert shape(fold) == [
        ("reasoning", None, "Think.", "completed"),
        ("message", "final_answer", "The answer.", "completed"),
    ]
    first, second = client.requests
    own = ids(ANALYSIS + "Think." + NEXT + FINAL)
    assert second.prompt_token_ids == [1, 2, 3, *own]
    num_first = len(ids(ANALYSIS + "Think.<|return|>"))
    assert second.sampling.max_tokens == 50 - num_first
    assert (second.sampling.seed, second.sampling.min_tokens) == (7, 0)
    assert first.sampling.grammar == second.sampling.grammar == "g"
    # The grammar has already consumed the tokens at the end of the second round's prompt.
    assert (first.sampling.grammar_context, second.sampling.grammar_context) == (0, len(own))
    assert first.request_id != second.request_id
    assert fold.ended.reason == "stop"
    assert fold.ended.usage.input_tokens == 3
    assert fold.ended.usage.output_tokens == num_first + len(ids("The answer.<|return|>"))
    assert list(fold.items[1].token_ids) == ids(FINAL + "The answer.")
    assert list(fold.ended.output_token_ids) == ids(ANALYSIS + "Think.<|return|>The answer.<|return|>")


def test_a_forced_answer_of_each_choice_has_the_seed_of_its_choice() -> None:
    client = in_rounds(ANALYSIS + "Think.<|return|>", "One.<|return|>", "Two.<|return|>")
    run(turn(client, n=2, sampling=SamplingSpec(n=2, max_tokens=50, seed=7)))
    first, *later = client.requests
    assert first.sampling.seed == 7
    seeds = [(1, 7), (1, choice_seed(7, 1))]
    assert sorted((asked.sampling.n, asked.sampling.seed) for asked in later) == seeds


def test_no_answer_is_forced_without_tokens_left() -> None:
    text = ANALYSIS + "Think.<|return|>"
    client = in_rounds(text, "never")
    sampling = SamplingSpec(max_tokens=len(ids(text)))
    fold = run(turn(client, sampling=sampling))[0]
    assert len(client.requests) == 1
    assert fold.ended.reason == "length"


@pytest.mark.parametrize(
    "text", ["\U0001f469\u200d\U0001f680 \U0001f9ea", "\U00013000\U00013001", "a\U0001fabcb\U0001fae8"]
)
def test_reasoning_tokens_are_counted_one_by_one(text: str) -> None:
    """A character of several tokens is one piece of text."""
    assert len(ids(text)) > len(text.replace("\u200d", ""))
    fold = one(ANALYSIS + text + NEXT + FINAL + "Yes.<|return|>")
    assert fold.items[0].text == text
    assert fold.ended.usage.reasoning_tokens == len(ids(text))


# --------------------------------------------------------------------------- stop strings


def test_stop_strings_apply_to_final_text_only() -> None:
    text = ANALYSIS + "STOP here" + NEXT + call("f", '{"a":"STOP"}') + NEXT + FINAL + "one STOP two<|return|>"
    client = playing(text)
    fold = run(turn(client, functions=["f"], stop=("STOP",)))[0]
    assert [i.text for i in fold.items] == ["STOP here", '{"a":"STOP"}', "one "]
    assert fold.items[2].status == "completed"
    assert fold.ended.stop_reason == "STOP"
    assert client.aborted == ["r"]
    upto = text.index("STOP two") + len("STOP")
    assert fold.ended.usage.output_tokens == len(ids(text[:upto]))


@pytest.mark.parametrize("step", [1, 3, 64])
def test_stop_string_over_several_tokens(step: int) -> None:
    fold = one(FINAL + "abc\n\nUser: next<|return|>", stop=("\nUser:",), tokens_per_step=step)
    assert fold.text("message") == "abc\n"
    included = one(FINAL + "abc\n\nUser: next<|return|>", stop=("\nUser:",), include_stop=True)
    assert included.text("message") == "abc\n\nUser:"


def test_a_stop_string_within_min_tokens_is_text() -> None:
    text = FINAL + "a. b. c. d.<|return|>"
    shown_from = {0: "a", 4: "a", 5: "a. b", 6: "a. b", 7: "a. b. c", 99: "a. b. c. d."}
    for min_tokens, shown in shown_from.items():
        fold = one(text, stop=(".",), min_tokens=min_tokens)
        assert fold.text("message") == shown
    assert ids(text)[4] == ids(".")[0]


def test_logprobs_follow_the_text_up_to_the_stop() -> None:
    fold = one(FINAL + "one two three STOP four<|return|>", stop=("STOP",), with_logprobs=True)
    item = fold.items[0]
    assert [entry.token_id for entry in item.logprobs] == item.content_token_ids
    assert item.text == "one two three "
    assert item.content_token_ids[:3] == ids("one two three")


def test_extra_stop_ids_are_hidden_and_named() -> None:
    dot = ids(".")[0]

    def name_the_stop(request: object, chunk: TokenChunk) -> None:
        if chunk.finish_reason is not None:
            chunk.stop_token_id = dot

    client = changing(FINAL + "Yes.", name_the_stop, finish_reason="stop")
    fold = run(turn(client))[0]
    assert shape(fold) == [("message", "final_answer", "Yes", "completed")]
    assert (fold.ended.reason, fold.ended.stop_reason) == ("stop", dot)
    assert fold.ended.usage.output_tokens == len(ids(FINAL + "Yes")) + 1


# --------------------------------------------------------------------------- tokens and text


def test_utf8_over_several_tokens_keeps_ids_and_logprobs_together() -> None:
    text = "née 😀 漢字 🧑‍🚀 end"
    for step in (1, 2, 64):
        fold = one(FINAL + text + "<|return|>", with_logprobs=True, tokens_per_step=step)
        item = fold.items[0]
        assert item.text == text
        assert item.content_token_ids == ids(text)
        assert [entry.token_id for entry in item.logprobs] == ids(text)


async def test_stream_interval_changes_only_the_size_of_chunks() -> None:
    text = ANALYSIS + "one two three four" + NEXT + FINAL + "five six seven eight nine ten<|return|>"

    async def deltas(interval: int) -> list[str]:
        events = [e async for _, batch in batches(playing(text), stream_interval=interval) for e in batch]
        return [event.text for event in events if isinstance(event, ItemDelta)]

    every, coarse = await deltas(1), await deltas(5)
    assert "".join(every) == "".join(coarse)
    assert coarse[0] == every[0]  # the first text goes out at once
    assert len(coarse) < len(every) / 2


async def test_a_stream_begins_with_its_first_token_even_if_invisible() -> None:
    hidden, opened, *_ = [events async for _, events in batches(playing(FINAL + "a b<|return|>"))]
    assert hidden == []
    assert isinstance(opened[0], ItemOpened)


@pytest.mark.parametrize(
    "between",
    ["<|return|>", "<|return|><|return|>", "<|end|><|return|>", "<|return|><|endoftext|><|return|>"],
)
def test_ignore_eos_continues_after_return(between: str) -> None:
    text = FINAL + f"a{between}<|start|>assistant" + FINAL + "b"
    fold = one(text, ignore_eos=True)
    assert [i.text for i in fold.items] == ["a", "b"]


def test_each_choice_ends_by_itself() -> None:
    client = playing(FINAL + "a STOP b<|return|>", FINAL + "no stop in here<|return|>")
    folds = run(turn(client, n=2, stop=("STOP",)))
    assert [fold.text("message") for fold in folds] == ["a ", "no stop in here"]
    assert client.aborted == []
    assert client.dropped == [("r", 0)]  # the engine does not go on with what nobody will read


# --------------------------------------------------------------------------- errors and leaving


def test_an_engine_error_of_one_choice() -> None:
    fold = one(FINAL + "x", finish_reason="error")
    assert fold.ended.reason == "error"
    assert fold.items[0].status == "incomplete"


# --------------------------------------------------------------------------- the fold


def test_the_fold_checks_the_contract() -> None:
    opened = ItemOpened(0, "msg_1", "message")
    for events in (
        [ItemDelta(0, "x")],
        [ItemOpened(1, "msg_1", "message")],
        [opened, ItemClosed(0), ItemDelta(0, "x")],
        [opened, TurnEnded("stop", None)],  # type: ignore[arg-type]
        [TurnEnded("stop", None), opened],  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError):  # noqa: PT011 (the messages differ)
            Fold().add(events)


async def test_each_schema_of_a_request_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    make = rules.json_schema

    def counted(schema: Any, param: str) -> Constraint:
        seen.append(param)
        return make(schema, param)

    monkeypatch.setattr(rules, "json_schema", counted)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in "abc"
    ]

    async with served(None) as server:
        answer = await server.chat(tools=tools, tool_choice="required", max_tokens=1)
        assert answer.status_code == 200, answer.text
    assert len(seen) == len(tools)
