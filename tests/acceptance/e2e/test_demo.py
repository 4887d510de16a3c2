"""The demo checkpoint behind a real server: questions, agent loops and schemas with answers that are right.

What is asked here has to work for somebody who types ``chorale serve`` and nothing else.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
import pydantic
import pytest

from chorale.api.operator.page import DEMO_EXAMPLES
from tests.support.served import Served, at_once

MODEL = "demo"
FUNCTION = {
    "name": "get_weather",
    "description": "Get the current weather for a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "City name"}},
        "required": ["city"],
    },
}
TOOL: Any = {"type": "function", "function": FUNCTION}
FLAT_TOOL: Any = {"type": "function", "strict": False, **FUNCTION}
WEATHER = '{"temperature": 18, "condition": "cloudy"}'


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str
    age: int
    city: str


@pytest.fixture
def client(demo_served: Served) -> openai.OpenAI:
    return demo_served.client()


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


SUMS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("What is 17 + 25?", 42, {"temperature": 0}),
    ("What is 812 - 345?", 467, {}),
    ("What is 23 * 17?", 391, {"temperature": 1, "seed": 3}),
)


def test_sums_with_reasoning(client: openai.OpenAI) -> None:
    def chat(question: str, sampling: dict[str, Any]) -> Any:
        return client.chat.completions.create(model=MODEL, messages=user(question), **sampling)

    def respond(question: str) -> Any:
        return client.responses.create(model=MODEL, input=question, temperature=0)

    asked = [partial(chat, question, sampling) for question, _, sampling in SUMS]
    found = at_once(*asked, *(partial(respond, question) for question, _, _ in SUMS))
    for (_, answer, _), made, response in zip(SUMS, found[: len(SUMS)], found[len(SUMS) :], strict=True):
        choice = made.choices[0]
        assert choice.finish_reason == "stop"
        assert str(choice.message.content).endswith(f"= {answer}")
        assert str(answer) in choice.message.reasoning
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output_text.endswith(f"= {answer}")
        assert response.status == "completed"


def test_effort_is_followed(client: openai.OpenAI) -> None:
    def ask(effort: Any) -> Any:
        return client.responses.create(
            model=MODEL, input="What is 17 + 25?", reasoning={"effort": effort}, temperature=0
        )

    lengths = []
    for response in at_once(*(partial(ask, effort) for effort in ("low", "medium", "high"))):
        assert response.output_text.endswith("= 42")
        assert response.usage is not None
        lengths.append(response.usage.output_tokens_details.reasoning_tokens)
    assert lengths[0] < lengths[1] < lengths[2]


def test_weather_round_trip_through_chat(client: openai.OpenAI) -> None:
    messages = user("What's the weather like in Paris?")
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0)
    (call,) = first.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert first.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER})
    last = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0)
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].message.content == "The temperature is 18 and the condition is cloudy."


@pytest.mark.parametrize("stored", [True, False])
def test_weather_round_trip_through_responses(client: openai.OpenAI, stored: bool) -> None:
    """Going on by id, and with everything sent again by the client."""
    asked: list[Any] = user("What's the weather like in Paris?")
    options: dict[str, Any] = {"model": MODEL, "tools": [FLAT_TOOL], "temperature": 0, "store": stored}
    first = client.responses.create(input=asked, **options)
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call = first.output[1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    if stored:
        last = client.responses.create(input=[result], previous_response_id=first.id, **options)  # type: ignore[list-item]
    else:
        items = [item.model_dump(exclude_none=True) for item in first.output]
        last = client.responses.create(input=[*asked, *items, result], **options)
    assert last.output_text == "The temperature is 18 and the condition is cloudy."


def test_an_agent_loop_of_two_calls(client: openai.OpenAI) -> None:
    """The client's own loop, until no call comes: one question, two cities."""
    messages = user("What is the weather in Paris and Rome?")
    cities = []
    for _ in range(4):
        done = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0)
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        (call,) = message.tool_calls
        assert call.type == "function"
        cities.append(json.loads(call.function.arguments)["city"])
        degrees = json.dumps({"temperature": 10 + len(cities)})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": degrees})
    assert cities == ["Paris", "Rome"]
    assert messages[-1]["content"].endswith("The temperature is 12.")


def test_no_call_where_none_is_needed(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=user("What is 17 + 25?"), tools=[TOOL], temperature=0
    )
    assert done.choices[0].message.tool_calls is None
    assert str(done.choices[0].message.content).endswith("= 42")


def test_a_schema_is_filled_from_the_sentence(client: openai.OpenAI) -> None:
    sentence = "Anna is 31 years old and lives in Berlin."
    expected = Person(name="Anna", age=31, city="Berlin")
    chat, response = at_once(
        lambda: client.chat.completions.parse(
            model=MODEL, messages=user(sentence), response_format=Person, temperature=0
        ),
        lambda: client.responses.parse(model=MODEL, input=sentence, text_format=Person, temperature=0),
    )
    assert chat.choices[0].message.parsed == expected
    assert response.output_parsed == expected


def test_it_says_what_it_is_and_what_it_cannot(client: openai.OpenAI) -> None:
    def ask(question: str) -> str:
        done = client.chat.completions.create(model=MODEL, messages=user(question), temperature=0)
        return str(done.choices[0].message.content)

    identity, unknown, real, poem = at_once(
        lambda: ask("Who are you?"),
        lambda: ask("What is the capital of France?"),
        lambda: ask("How do I run the real model?"),
        lambda: ask("Write a poem about trees."),
    )
    assert identity.startswith("I am a small demo model")
    assert unknown.startswith("I cannot answer that")
    assert "chorale serve openai/gpt-oss-20b" in real
    assert "real model" in poem


SUGGESTED = {
    "What can you do?": "JSON",
    "What is 2 + 3 * 4?": "= 14",
    "Sort these numbers: 31, 4, 15": "4, 15, 31",
    "Reverse the word hello": "olleh",
    "Is this review positive or negative: The pizza was great!": "positive",
    "Give me a JSON object with name and age for Anna, 31": '{"name":"Anna","age":31}',
    "Wer bist du?": "Ich bin das kleine Demo-Modell",
}


def test_each_suggestion_of_the_page_has_an_answer_to_check() -> None:
    assert tuple(SUGGESTED) == DEMO_EXAMPLES


@pytest.fixture(scope="module")
def suggestions(demo_served: Served) -> dict[str, list[str]]:
    """Three answers to each question, at the temperature that the page asks with: the checkpoint's own."""
    client = demo_served.client()

    def ask(question: str, seed: int) -> str:
        return client.responses.create(model=MODEL, input=question, extra_body={"seed": seed}).output_text

    asked = [question for question in SUGGESTED for _ in range(3)]
    found = at_once(*(partial(ask, question, place % 3) for place, question in enumerate(asked)))
    return {question: found[3 * place : 3 * place + 3] for place, question in enumerate(SUGGESTED)}


@pytest.mark.parametrize("question", SUGGESTED)
def test_the_suggestions_of_the_page_are_answered_rightly(
    suggestions: dict[str, list[str]], question: str
) -> None:
    assert len(suggestions[question]) == 3
    for text in suggestions[question]:
        assert SUGGESTED[question] in text


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="My name is Anna.", temperature=0)
    second = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0
    )
    assert second.output_text == "Your name is Anna."


QUESTIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("What is 17 + 25?", ()),
    ("What's the weather like in Paris?", (TOOL,)),
    ("Reverse this list: red, blue, green", ()),
    ("Hello!", (TOOL,)),
)
# Streams at temperature 0 are compared with bodies by test_sdk.py and test_replicas.py too.
TEMPERATURES = [pytest.param(0.0, marks=pytest.mark.slow), 1.0]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_chat_stream_folds_to_the_body(client: openai.OpenAI, temperature: float) -> None:
    def ask(question: str, tools: tuple[Any, ...], **more: Any) -> Any:
        fields: dict[str, Any] = {"messages": user(question), "seed": 5, "n": 2, "temperature": temperature}
        fields |= {"tools": list(tools)} if tools else {}
        return client.chat.completions.create(model=MODEL, **fields, **more)

    def stream(question: str, tools: tuple[Any, ...]) -> list[Any]:
        return list(ask(question, tools, stream=True, stream_options={"include_usage": True}))

    found = at_once(*(partial(how, *asked) for asked in QUESTIONS for how in (ask, stream)))
    for body, chunks in zip(found[::2], found[1::2], strict=True):
        check_chat_fold(body, chunks)


def check_chat_fold(body: Any, chunks: list[Any]) -> None:
    folded: dict[int, list[str]] = {0: ["", "", "", ""], 1: ["", "", "", ""]}
    reasons, usage = {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts, delta = folded[choice.index], choice.delta
            texts[0] += delta.content or ""
            texts[1] += getattr(delta, "reasoning", None) or ""
            for call in delta.tool_calls or []:
                texts[2] += call.function.name or ""
                texts[3] += call.function.arguments or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for choice in body.choices:
        message = choice.message
        calls = [call.function for call in message.tool_calls or [] if call.type == "function"]
        whole = [message.content or "", getattr(message, "reasoning", None) or ""]
        whole += ["".join(call.name for call in calls), "".join(call.arguments for call in calls)]
        assert whole == folded[choice.index]
        assert choice.finish_reason == reasons[choice.index] == ("tool_calls" if calls else "stop")
    assert len(body.choices) == 2
    assert body.usage == usage


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_responses_stream_folds_to_the_body(client: openai.OpenAI, temperature: float) -> None:
    def fields(question: str, tools: tuple[Any, ...]) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": MODEL, "input": question, "extra_body": {"seed": 5}}
        return asked | {"temperature": temperature} | ({"tools": [FLAT_TOOL]} if tools else {})

    def ask(question: str, tools: tuple[Any, ...]) -> Any:
        return client.responses.create(**fields(question, tools))

    def stream(question: str, tools: tuple[Any, ...]) -> Any:
        with client.responses.stream(**fields(question, tools)) as events:
            return events.get_final_response()  # its state machine raises on a malformed stream

    found = at_once(*(partial(how, *asked) for asked in QUESTIONS for how in (ask, stream)))
    for body, final in zip(found[::2], found[1::2], strict=True):
        assert body.status == final.status == "completed"
        assert [item.type for item in body.output] == [item.type for item in final.output]
        assert body.output_text == final.output_text
        assert spoken(body) == spoken(final)
        assert body.usage is not None
        assert final.usage is not None
        assert body.usage.output_tokens == final.usage.output_tokens


def spoken(response: Any) -> list[Any]:
    """What the items say, without their ids."""
    found: list[Any] = []
    for item in response.output:
        parts = getattr(item, "content", None) or []
        found.append((item.type, getattr(item, "arguments", None), [part.text for part in parts]))
    return found
