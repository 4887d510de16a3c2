"""The ``openai`` SDK, unmodified, over a socket: the calls that ``e2e/test_demo.py`` does not make.

The API tests cover each in detail, stored objects and errors with the SDK, too, but without a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.engine.scripted_client import ScriptedClient
from tests.support.scripted import ANALYSIS, FINAL, NEXT, call, in_rounds, playing
from tests.support.server import VOCAB, Server, in_thread

END, CALL = "<|return|>", "<|call|>"
HELLO = ANALYSIS + "Say hi." + NEXT + FINAL + "Hi there!" + END
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}  # fmt: skip
CHAT_WEATHER: Any = {"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}


@contextlib.contextmanager
def sdk(*rounds: str, client: ScriptedClient | None = None) -> Iterator[tuple[openai.OpenAI, Server]]:
    with (
        in_thread(client or in_rounds(*rounds), names=("demo",)) as server,
        openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0, timeout=20) as found,
    ):
        yield found, server


def gone(work: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        work(*arguments, **options)


# --------------------------------------------------------------------------- models


def test_models() -> None:
    with sdk(HELLO) as (client, _):
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").object == "model"
        gone(client.models.retrieve, "gpt-9")
        with pytest.raises(openai.APIStatusError) as caught:
            client.models.delete("demo")
        assert caught.value.status_code == 405
        assert caught.value.body["message"]  # type: ignore[index]


# --------------------------------------------------------------------------- responses


def test_responses_stream_and_continue() -> None:
    first = ANALYSIS + "Weather?" + NEXT + call("get_weather", '{"city":"Paris"}') + CALL
    with sdk(first, FINAL + "It rains." + END) as (client, server):
        with client.responses.stream(model="demo", input="Paris?", tools=[WEATHER]) as stream:
            kinds = [event.type for event in stream]
            asked = stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        made = asked.output[1]
        assert made.type == "function_call"
        assert made.parsed_arguments == {"city": "Paris"}
        result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "rain"}
        told = client.responses.create(
            model="demo", input=[result], previous_response_id=asked.id, tools=[WEATHER], stream=True
        )
        events = list(told)
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "It rains."
        assert "Weather?" in server.prompts()[1]  # reasoning between calls


def test_responses_count_and_compact() -> None:
    with sdk(HELLO, FINAL + "They said hello." + END, FINAL + "Yes." + END) as (client, server):
        count = client.responses.input_tokens.count(model="demo", input="hello", tools=[WEATHER])
        first = client.responses.create(model="demo", input="hello", tools=[WEATHER])
        assert first.usage is not None
        assert count.input_tokens == first.usage.input_tokens
        compacted = client.responses.compact(model="demo", previous_response_id=first.id)
        # OpenAI's answer has a user message in the output, about which the SDK's types warn.
        kept: Any = compacted.model_dump(exclude_none=True, warnings=False)["output"]
        client.responses.create(model="demo", input=[*kept, {"role": "user", "content": "and?"}])
        assert "They said hello." in server.prompts()[-1]


# --------------------------------------------------------------------------- chat and completions


def test_chat_stream() -> None:
    with sdk(HELLO, call("get_weather", '{"city":"Paris"}') + CALL) as (client, _):
        ask: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
        with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
            told = "".join(event.delta for event in stream if event.type == "content.delta")
            final = stream.get_final_completion()
        assert told == final.choices[0].message.content == "Hi there!"
        assert final.usage is not None
        with client.chat.completions.stream(**ask, tools=[CHAT_WEATHER]) as stream:
            final = stream.get_final_completion()
        [tool] = final.choices[0].message.tool_calls or []
        assert (final.choices[0].finish_reason, tool.function.parsed_arguments) == (
            "tool_calls", {"city": "Paris"},
        )  # fmt: skip


def test_completions() -> None:
    with sdk("and so on", "and so on") as (client, server):
        made = client.completions.create(model="demo", prompt="Once", max_tokens=8)
        assert made.choices[0].text == "and so on"
        streamed = client.completions.create(
            model="demo", prompt="Once", stream=True, stream_options={"include_usage": True}
        )
        chunks = list(streamed)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "and so on"
        assert chunks[-1].usage == made.usage
        assert [request.prompt_token_ids for request in server.client.requests] == [VOCAB.encode("Once")] * 2


# --------------------------------------------------------------------------- asynchronous, errors, raw


def test_the_asynchronous_client_and_raw_answers() -> None:
    async def work(server: Server) -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="unused", max_retries=0) as client:
            raw = await client.responses.with_raw_response.create(model="demo", input="hello")
            assert raw.headers["x-request-id"]
            assert raw.parse().output_text == "Hi there!"

    with in_thread(playing(HELLO)) as server:
        asyncio.run(work(server))
