"""Chat Completions, Completions and Messages: text, calls, ends, errors; whole and streamed."""

from __future__ import annotations

from typing import Any

from chorale.harmony.vocab import load_vocabulary
from tests.support.engine.scripted_client import Script
from tests.support.scripted import FINAL, NEXT, PREAMBLE, call
from tests.support.wire.server import RecordedServer
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


async def chat(server: RecordedServer) -> None:
    for stream in STREAMED:
        await _chat_texts(server, stream)
        await _chat_calls(server, stream)
        server.play(SEARCH, OPEN, FIND, CODE, ECHO, FAILED, CITED)
        await server.post(CHAT, messages=CHAT_HI, tools=SERVER_TOOLS, stream=stream)
        server.play(BROKEN)
        await server.post(CHAT, 200 if stream else 503, messages=CHAT_HI, stream=stream)


async def _chat_texts(server: RecordedServer, stream: bool) -> None:
    ask: dict[str, Any] = {"messages": CHAT_HI, "stream": stream}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if stream else {}
    server.play(HELLO, num_cached_tokens=4)
    await server.post(CHAT, **ask)
    await server.post(CHAT, **ask, n=3, **usage)
    await server.post(CHAT, **ask, include_reasoning=False, max_tokens=30)
    await server.post(CHAT, **ask, stop=["there"])
    await server.post(CHAT, **ask, logprobs=True, top_logprobs=2)
    await server.post(CHAT, **ask, return_token_ids=True)
    server.play(f"{THINK}{FINAL}Half")
    await server.post(CHAT, **ask)
    server.play(JSON)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    await server.post(CHAT, **ask, response_format=form)
    await server.post(CHAT, **ask, response_format={"type": "json_object"})


async def _chat_calls(server: RecordedServer, stream: bool) -> None:
    ask: dict[str, Any] = {"messages": CHAT_HI, "stream": stream}
    get = {"type": "function", "function": {"name": "get", "parameters": SCHEMA}}
    note = {"type": "custom", "custom": {"name": "note"}}
    server.play(THINK + PREAMBLE + "I look." + NEXT + call("get", '{"n":1}') + CALL)
    await server.post(CHAT, **ask, tools=[get], parallel_tool_calls=False)
    await server.post(CHAT, **ask, functions=[get["function"]])
    server.play(call("get", '{"n":1}') + NEXT + call("get", '{"n":2}') + CALL)
    await server.post(CHAT, **ask, tools=[get])
    server.play(call("note", '{"input":"text"}') + CALL)
    await server.post(CHAT, **ask, tools=[note])


async def chat_stored(server: RecordedServer) -> None:
    messages = [*CHAT_HI, {"role": "assistant", "content": None, "refusal": "No."}, *CHAT_HI]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    server.play(HELLO)
    await server.get(CHAT)
    made = await server.post(CHAT, messages=messages, store=True, metadata={"a": "b"}, seed=1)
    await server.post(CHAT, messages=parts, store=True, stream=True)
    one = f"{CHAT}/{made['id']}"
    await server.get(CHAT)
    await server.get(one)
    await server.get(f"{one}/messages")
    await server.bare(one, metadata={"c": "d"})
    await server.delete(one)
    await server.get(one, 404)


async def completions(server: RecordedServer) -> None:
    for stream in STREAMED:
        ask: dict[str, Any] = {"stream": stream}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        server.play(Script(load_vocabulary().encode(" world"), with_logprobs=True))
        for fields in (
            {"prompt": "hello"},
            {"prompt": ["a", "b"], "n": 2, **usage},
            {"prompt": "hello", "echo": True, "logprobs": 2, "return_token_ids": True},
            {"prompt": [1, 2, 3], "stop": ["o"]},
        ):
            await server.post("/v1/completions", **ask, **fields)
        server.play(BROKEN)
        await server.post("/v1/completions", 200 if stream else 503, prompt="hello", **ask)


async def messages(server: RecordedServer) -> None:
    tools = [{"name": "get", "input_schema": SCHEMA}]
    thinking = {"type": "adaptive"}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    for stream in STREAMED:
        ask: dict[str, Any] = {"messages": CHAT_HI, "max_tokens": 100, "stream": stream}
        server.play(HELLO, num_cached_tokens=4)
        await server.post(MESSAGES, **ask)
        await server.post(MESSAGES, **ask, thinking=thinking)
        await server.post(MESSAGES, **ask, thinking={"type": "adaptive", "display": "omitted"})
        await server.post(MESSAGES, **ask, stop_sequences=["there"])
        server.play(THINK + PREAMBLE + "I look." + NEXT + call("get", '{"n":1}') + CALL)
        await server.post(MESSAGES, **ask, tools=tools, thinking=thinking)
        server.play(call("get", '{"n":1}') + NEXT + call("get", "") + CALL)
        await server.post(MESSAGES, **ask, tools=tools)
        server.play(JSON)
        await server.post(MESSAGES, **ask, output_config=form)
        server.play(f"{THINK}{FINAL}Half")
        await server.post(MESSAGES, **ask)
        server.play(BROKEN)
        await server.post(MESSAGES, 200 if stream else 503, **ask)
    await server.post(f"{MESSAGES}/count_tokens", messages=CHAT_HI)
