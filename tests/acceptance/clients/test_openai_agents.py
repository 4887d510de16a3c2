"""OpenAI's agent framework, unmodified, with its models: Responses over HTTP, over a WebSocket, and Chat."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.engine.scripted_client import ScriptedClient
from tests.support.scripted import ANALYSIS, FINAL, NEXT, call, in_rounds
from tests.support.server import Server, served

agents: Any = None  # set by ``_framework``
END, CALL = "<|return|>", "<|call|>"
KINDS = ("responses", "websocket", "chat")
MODELS = {
    "responses": "OpenAIResponsesModel",
    "websocket": "OpenAIResponsesWSModel",
    "chat": "OpenAIChatCompletionsModel",
}


@pytest.fixture(autouse=True)
def _framework() -> None:
    """Imports the framework. Here, because every worker imports the tests, and this import takes a second."""
    global agents
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)  # it would send traces to OpenAI


@contextlib.asynccontextmanager
async def model(script: ScriptedClient, kind: str) -> AsyncIterator[tuple[Any, Server]]:
    """Yields a model of the framework, and its server."""
    async with (
        served(script, listens=True) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="unused", max_retries=0, timeout=30) as client,
    ):
        made = getattr(agents, MODELS[kind])(model="demo", openai_client=client)
        try:
            yield made, server
        finally:
            await made.close()


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


@pytest.mark.parametrize("kind", KINDS)
async def test_a_tool_is_called_and_its_result_reaches_the_answer(kind: str) -> None:
    script = in_rounds(
        ANALYSIS + "I need the weather." + NEXT + call("get_weather", '{"city":"Paris"}') + CALL,
        FINAL + "Take an umbrella." + END,
    )
    async with model(script, kind) as (made, server):
        tools = [agents.function_tool(get_weather)]
        agent = agents.Agent(name="Clerk", instructions="Be brief.", model=made, tools=tools)
        result = await agents.Runner.run(agent, "What is the weather in Paris?")
        assert result.final_output == "Take an umbrella."
        assert "It rains in Paris." in server.prompts()[1]
        if kind != "chat":  # Chat clients of this framework send no reasoning back
            assert "I need the weather." in server.prompts()[1]


@pytest.mark.parametrize("kind", KINDS)
async def test_streamed(kind: str) -> None:
    script = in_rounds(call("get_weather", '{"city":"Oslo"}') + CALL, FINAL + "Wet, I fear." + END)
    async with model(script, kind) as (made, _):
        agent = agents.Agent(name="Clerk", model=made, tools=[agents.function_tool(get_weather)])
        streamed, text = agents.Runner.run_streamed(agent, "Weather in Oslo?"), ""
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        assert (streamed.final_output, text) == ("Wet, I fear.", "Wet, I fear.")


async def test_handoff() -> None:
    script = in_rounds(call("transfer_to_spanish_agent", "{}") + CALL, FINAL + "Hola." + END)
    async with model(script, "responses") as (made, server):
        spanish = agents.Agent(name="Spanish agent", instructions="Answer in Spanish.", model=made)
        triage = agents.Agent(name="Triage", model=made, handoffs=[spanish])
        result = await agents.Runner.run(triage, "Hola, como estas?")
        assert result.final_output == "Hola."
        assert result.last_agent.name == "Spanish agent"
        assert "Answer in Spanish." in server.prompts()[1]


@pytest.mark.parametrize("kind", ["responses", "chat"])
@pytest.mark.parametrize("choice", ["required", "get_weather"])
async def test_forced_tool_choice(kind: str, choice: str) -> None:
    script = in_rounds(call("get_weather", '{"city":"Rome"}') + CALL, FINAL + "Done." + END)
    async with model(script, kind) as (made, server):
        settings, tools = agents.ModelSettings(tool_choice=choice), [agents.function_tool(get_weather)]
        agent = agents.Agent(name="Clerk", model=made, tools=tools, model_settings=settings)
        result = await agents.Runner.run(agent, "Rome?")
        assert result.final_output == "Done."
        demanded, free = (request.sampling.grammar for request in server.client.requests)
        assert demanded != free  # the framework demands the call once; its functions are strict both times


@pytest.mark.parametrize("kind", KINDS)
async def test_structured_output(kind: str) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    async with model(in_rounds(FINAL + '{"name":"Ada","age":36}' + END), kind) as (made, server):
        agent = agents.Agent(name="Clerk", model=made, output_type=Person)
        result = await agents.Runner.run(agent, "Ada is 36.")
        assert result.final_output == Person(name="Ada", age=36)
        assert server.client.requests[0].sampling.grammar is not None
