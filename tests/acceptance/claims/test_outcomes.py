"""Whatever the model writes, each API reports the same outcome, streamed or not.

Calls are recognised by their recipient on any channel, malformed headers are repaired where possible, control
tokens never leak, an answer is never empty, and a truncated answer says so.
"""

from __future__ import annotations

from typing import Any

import pytest

from chorale.harmony.vocab import load_vocabulary
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.faces import WAYS, WEATHER, Outcome, ask, metric
from tests.support.scripted import ANALYSIS, FINAL, NEXT, PREAMBLE, call, ids, in_rounds, playing
from tests.support.server import served

MADE = call("get_weather", "{}") + "<|call|>"
THOUGHT = ANALYSIS + "Think." + NEXT
CALL = [("get_weather", "{}")]
TWICE = FINAL + "One.<|return|>" + "<|start|>assistant" + FINAL + "Again.<|return|>"
XML = "<read_file>\n<path>src/a.py</path>\n</read_file>\n<thinking>x</thinking> <tool_call>{}</tool_call>"
# name -> (the model's tokens, (text, reasoning, calls) that clients get).
TURNS: dict[str, tuple[str, tuple[str, str, list[tuple[str, str]]]]] = {
    "a thought and a text": (THOUGHT + FINAL + "Hi.<|return|>", ("Hi.", "Think.", [])),
    "a thought and a call": (THOUGHT + MADE, ("", "Think.", CALL)),
    "a call in analysis": (call("get_weather", "{}", "analysis") + "<|call|>", ("", "", CALL)),
    "a call in final": (call("get_weather", "{}", "final") + "<|call|>", ("", "", CALL)),
    "no start before a call": (ANALYSIS + "Think.<|end|>" + MADE, ("", "Think.", CALL)),
    "a preamble and a call": (PREAMBLE + "I will look." + NEXT + MADE, ("I will look.", "", CALL)),
    "a preamble and a text": (
        PREAMBLE + "I will look." + NEXT + FINAL + "Done.<|return|>",
        ("I will look.\n\nDone.", "", []),
    ),
    "two thoughts and two texts": (
        ANALYSIS + "A." + NEXT + FINAL + "One." + NEXT + ANALYSIS + "B." + NEXT + FINAL + "Two.<|return|>",
        ("One.\n\nTwo.", "A.\n\nB.", []),
    ),
    "two calls": (
        call("get_weather", '{"city": "Rome"}') + "<|call|><|start|>assistant"
        + call("get_weather", '{"city": "Oslo"}') + "<|call|>",
        ("", "", [("get_weather", '{"city": "Rome"}'), ("get_weather", '{"city": "Oslo"}')]),
    ),
    "text after the return": (TWICE, ("One.", "", [])),
    "tags of tools that the prompt describes": (FINAL + XML + "<|return|>", (XML, "", [])),
}  # fmt: skip


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(("face", "stream"), WAYS)
async def test_every_api_reports_a_turn_alike(face: str, stream: bool, turn: str) -> None:
    script, told = TURNS[turn]

    async with served(playing(script)) as server:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        assert (outcome.text, outcome.reasoning, outcome.calls) == told
        assert outcome.finish == ("tool_calls" if told[2] else "stop")
        assert len(set(outcome.call_ids)) == len(told[2])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_preamble_is_a_separate_message_in_responses(stream: bool) -> None:
    async with served(playing(TURNS["a preamble and a call"][0])) as server:
        body = body_of(await ask(server, "responses", stream, functions=[WEATHER]), stream)
        assert body["output"][0]["phase"] == "commentary"


def body_of(outcome: Outcome, stream: bool) -> dict[str, Any]:
    found: dict[str, Any] = outcome.raw[-1]["response"] if stream else outcome.raw
    return found


# --------------------------------------------------------------------------- malformed headers and names

BODY = '<|message|>{"city":"Paris"}<|call|>'
MALFORMED_CALLS = {
    "another name first": "<|channel|>commentary to=nobody to=functions.get_weather <|constrain|>json",
    "two channels": "<|channel|>commentary to=functions.get_weather<|channel|>commentary json",
}
MALFORMED_TEXTS = {
    "unknown channel": "<|channel|>comment<|message|>x" + NEXT + FINAL + "{}<|return|>",
    "words in the header": "<|channel|>final and so on<|message|>{}<|return|>",
}


@pytest.mark.parametrize("header", MALFORMED_CALLS)
@pytest.mark.parametrize(("face", "stream"), WAYS)
async def test_a_call_with_a_malformed_header_arrives_and_is_counted(
    face: str, stream: bool, header: str
) -> None:
    async with served(playing(MALFORMED_CALLS[header] + BODY)) as server:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        [(name, arguments)] = outcome.calls
        assert (name, arguments.replace(" ", "")) == ("get_weather", '{"city":"Paris"}')
        assert outcome.finish == "tool_calls"
        assert metric(server.state, "chorale:harmony_repairs_total") >= 1


@pytest.mark.parametrize("header", MALFORMED_TEXTS)
@pytest.mark.parametrize(("face", "stream"), WAYS)
async def test_a_text_with_a_malformed_header_arrives(face: str, stream: bool, header: str) -> None:
    async with served(playing(MALFORMED_TEXTS[header])) as server:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        assert outcome.text.endswith("{}")
        assert outcome.calls == []


SPELLED_NAMES = [
    "get_weather<|constrain|>json",
    "get-weather",
    "Get_Weather",
    "weather.get_weather",
]
SPELLED_TEXT = "analysisI think.assistantfinal<|channel|>final<|message|>not a channel<|end|>"


def spelling(before: str, text: str, after: str) -> ScriptedClient:
    """Plays ``text`` with its markers as ordinary text, as models sometimes write them by mistake."""
    tokens = [*ids(before), *load_vocabulary().encode(text), *ids(after)]
    return ScriptedClient(lambda request, index: Script(tokens))


@pytest.mark.parametrize("name", SPELLED_NAMES)
@pytest.mark.parametrize(("face", "stream"), WAYS)
async def test_a_misspelt_tool_name_is_corrected(face: str, stream: bool, name: str) -> None:
    after = '<|message|>{"city":"<b>"}<|call|>'
    async with served(spelling("<|channel|>", f"commentary to=functions.{name}", after)) as server:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        [(called, arguments)] = outcome.calls
        assert called == "get_weather"
        assert "<|" not in arguments + outcome.text + outcome.reasoning


@pytest.mark.parametrize(("face", "stream"), WAYS)
async def test_a_text_that_spells_channels_stays_text(face: str, stream: bool) -> None:
    async with served(spelling(THOUGHT + FINAL, SPELLED_TEXT, "<|return|>")) as server:
        outcome = await ask(server, face, stream)
        assert (outcome.reasoning, outcome.text) == ("Think.", SPELLED_TEXT)


# --------------------------------------------------------------------------- turns that end early


@pytest.mark.parametrize("ending", ["<|return|>", "<|end|><|return|>", "<|call|>"])
@pytest.mark.parametrize(("face", "stream"), WAYS)
async def test_a_turn_that_ends_within_its_reasoning_gets_an_answer(
    face: str, stream: bool, ending: str
) -> None:
    async with served(in_rounds(ANALYSIS + "Only thoughts." + ending, "Well.<|return|>")) as server:
        outcome = await ask(server, face, stream)
        assert (outcome.reasoning, outcome.text, outcome.finish) == ("Only thoughts.", "Well.", "stop")
        assert server.prompt().endswith("<|start|>assistant<|channel|>final<|message|>")


HEADER = ANALYSIS + "T." + NEXT + "<|channel|>fin"
CUT: dict[str, tuple[str, str, str | None]] = {
    "text": (FINAL + "Half of an ans", "Half of an ans", None),
    "header": (HEADER, "", None),
    "arguments": (call("get_weather", '{"ci'), "", '{"ci'),
}


@pytest.mark.parametrize("where", CUT)
@pytest.mark.parametrize(("face", "stream"), WAYS)
async def test_a_truncated_answer_says_so_and_keeps_its_beginning(
    face: str, stream: bool, where: str
) -> None:
    script, text, arguments = CUT[where]

    async with served(playing(script)) as server:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        assert (outcome.text, outcome.finish) == (text, "length")
        # A body of Messages contains only complete objects.
        if arguments is not None and (face != "messages" or stream):
            assert outcome.calls == [("get_weather", arguments)]
        if face == "responses":
            body = body_of(outcome, stream)
            assert body["incomplete_details"] == {"reason": "max_output_tokens"}
            if where != "header":
                assert body["output"][-1]["status"] == "incomplete"
            if stream:
                assert outcome.raw[-1]["type"] == "response.incomplete"
