"""The demo checkpoint behind a real server answers questions, agent loops and schemas correctly.

All of it has to work for a user who types ``chorale serve`` without options.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
import pydantic
import pytest

import chorale
from benchmarks.offline import Case, seconds_over_http, server
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


def test_sums_are_answered_with_reasoning_and_without_a_call(client: openai.OpenAI) -> None:
    def chat(question: str, sampling: dict[str, Any]) -> Any:
        asked = user(question)
        return client.chat.completions.create(model=MODEL, messages=asked, tools=[TOOL], **sampling)

    def respond(question: str) -> Any:
        return client.responses.create(model=MODEL, input=question, temperature=0)

    asked = [partial(chat, question, sampling) for question, _, sampling in SUMS]
    found = at_once(*asked, *(partial(respond, question) for question, _, _ in SUMS))
    for (_, answer, _), made, response in zip(SUMS, found[: len(SUMS)], found[len(SUMS) :], strict=True):
        choice = made.choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
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


def test_weather_round_trip_through_responses(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "tools": [FLAT_TOOL], "temperature": 0}
    first = client.responses.create(input="What's the weather like in Paris?", **options)
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call = first.output[1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    last = client.responses.create(input=[result], previous_response_id=first.id, **options)  # type: ignore[list-item]
    assert last.output_text == "The temperature is 18 and the condition is cloudy."


def test_an_agent_loop_of_two_calls(client: openai.OpenAI) -> None:
    """The client calls tools until the model stops asking for them: one question, two cities."""
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


def test_it_says_what_it_is_and_what_it_cannot_do(client: openai.OpenAI) -> None:
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
    """Asks each question three times, at the page's temperature, which is the checkpoint's default."""
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


def test_the_speed_script_counts_a_servers_tokens(demo_served: Served) -> None:
    assert server(demo_served.url) == ("demo", chorale.__version__)
    seconds = seconds_over_http(demo_served.url, "demo", Case(rows=3, prompt=20, output=4))
    assert seconds(4) > 0  # raises if an answer has another number of tokens
