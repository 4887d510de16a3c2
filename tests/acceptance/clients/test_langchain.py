"""langchain-openai, unmodified, over Chat Completions and over Responses."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.scripted import ANALYSIS, FINAL, NEXT, call, in_rounds
from tests.support.server import Server, in_thread

langchain: Any = None  # set by ``_framework``

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
END, CALL = "<|return|>", "<|call|>"
both = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


@pytest.fixture(autouse=True)
def _framework() -> None:
    """Imports the framework. Here, because every worker imports the tests, and this import takes 0.6 s."""
    global langchain
    langchain = pytest.importorskip("langchain_openai")


def model(server: Server, responses: bool, **options: Any) -> Any:
    return langchain.ChatOpenAI(
        base_url=server.url, api_key="unused", model="demo", use_responses_api=responses, max_retries=0,
        timeout=30, **options,
    )  # fmt: skip


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


@both
def test_a_question_and_its_stream(responses: bool) -> None:
    with in_thread(in_rounds(ANALYSIS + "Hm." + NEXT + FINAL + "Forty-two." + END)) as server:
        made = model(server, responses)
        assert made.invoke("What is 17 + 25?").text == "Forty-two."
        assert "".join(chunk.text for chunk in made.stream("What is 17 + 25?")) == "Forty-two."


@both
def test_tools_round_trip(responses: bool) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    multiplication = tool(multiply)
    script = in_rounds(call("multiply", '{"a":6,"b":7}') + CALL, FINAL + "It is 42." + END)
    with in_thread(script) as server:
        made = model(server, responses).bind_tools([multiplication])
        history: list[Any] = [HumanMessage("6 times 7?")]
        first = made.invoke(history)
        assert [(each["name"], each["args"]) for each in first.tool_calls] == [("multiply", {"a": 6, "b": 7})]
        history += [first, multiplication.invoke(first.tool_calls[0])]
        assert made.invoke(history).text == "It is 42."
        assert "42" in server.prompts()[1].split("multiply")[-1]


@both
def test_structured_output(responses: bool) -> None:
    class Person(BaseModel):
        name: str
        age: int

    with in_thread(in_rounds(FINAL + '{"name":"Ada","age":36}' + END)) as server:
        made = model(server, responses).with_structured_output(Person, method="json_schema")
        assert made.invoke("Ada is 36.") == Person(name="Ada", age=36)
        assert server.client.requests[0].sampling.grammar is not None


@both
def test_reasoning_effort_and_usage(responses: bool) -> None:
    options = {"reasoning": {"effort": "high"}} if responses else {"reasoning_effort": "high"}
    with in_thread(in_rounds(ANALYSIS + "Think." + NEXT + FINAL + "Yes." + END)) as server:
        answer = model(server, responses, **options).invoke("Really?")
        assert "Reasoning: high" in server.prompts()[0]
        assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
