"""Chat Completions, Completions and Messages: text, calls, ends, errors; whole and streamed."""

from __future__ import annotations

from typing import Any

from chorale.harmony.vocab import load_vocabulary
from tests.support.engine.scripted_client import Script
from tests.support.scripted import FINAL, NEXT, PREAMBLE, call
from tests.support.server import Server
from tests.support.wire.server import post
from tests.support.wire.words import (
    BROKEN,
    CALL,
    CHAT,
    CHAT_HI,
    CITED,
    CODE,
    ECHO,
    FAILED,
    FIND,
    HELLO,
    JSON,
    MESSAGES,
    OPEN,
    SCHEMA,
    SEARCH,
    SERVER_TOOLS,
    STREAMED,
    THINK,
)


async def chat(server: Server) -> None:
    for stream in STREAMED:
        await _chat_texts(server, stream)
        await _chat_calls(server, stream)
        server.client.play(SEARCH, OPEN, FIND, CODE, ECHO, FAILED, CITED)
        await post(server, CHAT, messages=CHAT_HI, tools=SERVER_TOOLS, stream=stream)
        server.client.play(BROKEN)
        await post(server, CHAT, 200 if stream else 503, messages=CHAT_HI, stream=stream)


async def _chat_texts(server: Server, stream: bool) -> None:
    ask: dict[str, Any] = {"messages": CHAT_HI, "stream": stream}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if stream else {}
    server.client.play(HELLO, num_cached_tokens=4)
    await post(server, CHAT, **ask)
    await post(server, CHAT, **ask, n=3, **usage)
    await post(server, CHAT, **ask, include_reasoning=False, max_tokens=30)
    await post(server, CHAT, **ask, stop=["there"])
    await post(server, CHAT, **ask, logprobs=True, top_logprobs=2)
    await post(server, CHAT, **ask, return_token_ids=True)
    server.client.play(f"{THINK}{FINAL}Half")
    await post(server, CHAT, **ask)
    server.client.play(JSON)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    await post(server, CHAT, **ask, response_format=form)
    await post(server, CHAT, **ask, response_format={"type": "json_object"})


async def _chat_calls(server: Server, stream: bool) -> None:
    ask: dict[str, Any] = {"messages": CHAT_HI, "stream": stream}
    get = {"type": "function", "function": {"name": "get", "parameters": SCHEMA}}
    note = {"type": "custom", "custom": {"name": "note"}}
    server.client.play(THINK + PREAMBLE + "I look." + NEXT + call("get", '{"n":1}') + CALL)
    await post(server, CHAT, **ask, tools=[get], parallel_tool_calls=False)
    await post(server, CHAT, **ask, functions=[get["function"]])
    server.client.play(call("get", '{"n":1}') + NEXT + call("get", '{"n":2}') + CALL)
    await post(server, CHAT, **ask, tools=[get])
    server.client.play(call("note", '{"input":"text"}') + CALL)
    await post(server, CHAT, **ask, tools=[note])


async def chat_stored(server: Server) -> None:
    messages = [*CHAT_HI, {"role": "assistant", "content": None, "refusal": "No."}, *CHAT_HI]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    server.client.play(HELLO)
    await server.ask("GET", CHAT)
    made = await post(server, CHAT, messages=messages, store=True, metadata={"a": "b"}, seed=1)
    await post(server, CHAT, messages=parts, store=True, stream=True)
    one = f"{CHAT}/{made['id']}"
    await server.ask("GET", CHAT)
    await server.ask("GET", one)
    await server.ask("GET", f"{one}/messages")
    await server.ask("POST", one, metadata={"c": "d"})
    await server.ask("DELETE", one)
    await server.ask("GET", one, 404)


async def completions(server: Server) -> None:
    for stream in STREAMED:
        ask: dict[str, Any] = {"stream": stream}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        server.client.play(Script(load_vocabulary().encode(" world"), with_logprobs=True))
        for fields in (
            {"prompt": "hello"},
            {"prompt": ["a", "b"], "n": 2, **usage},
            {"prompt": "hello", "echo": True, "logprobs": 2, "return_token_ids": True},
            {"prompt": [1, 2, 3], "stop": ["o"]},
        ):
            await post(server, "/v1/completions", **ask, **fields)
        server.client.play(BROKEN)
        await post(server, "/v1/completions", 200 if stream else 503, prompt="hello", **ask)


async def messages(server: Server) -> None:
    tools = [{"name": "get", "input_schema": SCHEMA}]
    thinking = {"type": "adaptive"}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    for stream in STREAMED:
        ask: dict[str, Any] = {"messages": CHAT_HI, "max_tokens": 100, "stream": stream}
        server.client.play(HELLO, num_cached_tokens=4)
        await post(server, MESSAGES, **ask)
        await post(server, MESSAGES, **ask, thinking=thinking)
        await post(server, MESSAGES, **ask, thinking={"type": "adaptive", "display": "omitted"})
        await post(server, MESSAGES, **ask, stop_sequences=["there"])
        server.client.play(THINK + PREAMBLE + "I look." + NEXT + call("get", '{"n":1}') + CALL)
        await post(server, MESSAGES, **ask, tools=tools, thinking=thinking)
        server.client.play(call("get", '{"n":1}') + NEXT + call("get", "") + CALL)
        await post(server, MESSAGES, **ask, tools=tools)
        server.client.play(JSON)
        await post(server, MESSAGES, **ask, output_config=form)
        server.client.play(f"{THINK}{FINAL}Half")
        await post(server, MESSAGES, **ask)
        server.client.play(BROKEN)
        await post(server, MESSAGES, 200 if stream else 503, **ask)
    await post(server, f"{MESSAGES}/count_tokens", messages=CHAT_HI)
