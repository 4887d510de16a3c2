"""The unmodified OpenAI SDK: parsed answers, forced calls, strict tools, over the server's own processes.

The model is random, which a grammar must hold against; a schema filled with sense is in ``test_demo.py``.
"""

from __future__ import annotations

import enum

import openai
import pydantic
import pytest

from chorale.harmony.vocab import load_vocabulary
from tests.support.served import Served

MODEL = "tiny"
# The random model closes nothing by itself.
BIAS = {str(load_vocabulary().encode(text)[0]): 14 for text in ('"', "}", "]", '"}')}
MESSAGES = [{"role": "user", "content": "hi"}]


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    city: str
    unit: Unit
    days: list[bool]
    note: str | None


@pytest.mark.parametrize("seed", range(1))
def test_chat_parse(served: Served, seed: int) -> None:
    done = served.client().chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        response_format=Weather,
        seed=seed,
        logit_bias=BIAS,
        max_tokens=800,
    )
    assert isinstance(done.choices[0].message.parsed, Weather)


@pytest.mark.parametrize("seed", range(1))
def test_chat_stream_parses(served: Served, seed: int) -> None:
    with served.client().chat.completions.stream(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        response_format=Weather,
        seed=seed,
        logit_bias=BIAS,
        max_tokens=800,
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


@pytest.mark.parametrize("seed", range(1))
def test_responses_parse(served: Served, seed: int) -> None:
    fields = {"seed": seed, "logit_bias": BIAS}
    done = served.client().responses.parse(
        model=MODEL, input="hi", text_format=Weather, max_output_tokens=800, extra_body=fields
    )
    assert isinstance(done.output_parsed, Weather)
    with served.client().responses.stream(
        model=MODEL, input="hi", text_format=Weather, max_output_tokens=800, extra_body=fields
    ) as stream:
        assert stream.get_final_response().output_parsed == done.output_parsed


def test_a_forced_tool_parses(served: Served) -> None:
    done = served.client().chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        tools=[openai.pydantic_function_tool(Weather, name="report")],
        tool_choice="required",
        logit_bias=BIAS,
        max_tokens=800,
    )
    (call,) = done.choices[0].message.tool_calls or []
    assert done.choices[0].finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, Weather)


@pytest.mark.slow
def test_n_choices_are_all_valid(served: Served) -> None:
    done = served.client().chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        response_format=Weather,
        n=4,
        logit_bias=BIAS,
        max_tokens=800,
    )
    assert all(isinstance(choice.message.parsed, Weather) for choice in done.choices)


def test_an_unsupported_keyword_is_a_bad_request(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    with pytest.raises(openai.BadRequestError, match='"not"') as caught:
        served.client().chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form)  # type: ignore[call-overload]
    assert caught.value.param == "response_format.json_schema.schema"
