"""Background streams have the same bytes live, resumed and after a crash: they are rendered from a log."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from chorale.api.http.sse import frame
from chorale.api.responses.background.follow import follow
from chorale.api.responses.background.recovery import recovery
from chorale.api.responses.background.resume import Resumer
from chorale.api.responses.event_log import (
    _NAMED,
    LogEvent,
    TurnBegan,
    TurnFailed,
    join,
    pack,
    read_chunk,
)
from chorale.api.responses.items.objects import ResponseBuilder
from chorale.api.responses.translate import RenderOptions, Translator
from chorale.config.engine import ServerConfig
from chorale.engine.types import TokenLogprobs
from chorale.store.store import SqliteStore
from chorale.tools import contract as tools
from chorale.turns.events import (
    Cited,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    ToolOutcome,
    ToolProgressed,
    ToolStarted,
    TurnEnded,
    Usage,
)
from tests.support.engine.scripted_client import Script, ids
from tests.support.responses import HELLO, TOOL, VOCAB, fold_events, serve
from tests.support.scripted_tools import tools_served
from tests.support.sse import parse_sse
from tests.turns.tools.test_loop import CODE, ECHO, FINAL, MCP, PYTHON, SEARCH, THINK, WEB

SOURCE = tools.Source("https://a.example", "A", "about")
SCHEMA = {"type": "object", "": ["opened", 0], "properties": {"x": {"enum": [["closed", 1], "opened"]}}}
ALL: list[LogEvent] = [
    TurnBegan(),
    TurnFailed("code", "ü\ud7ff\n\n", None),
    ItemOpened(0, "msg_1", "message", phase="commentary"),
    ItemDelta(0, "a\n\n☃", (1, 2), (TokenLogprobs(1, float("-inf"), 9, [2, 3], [-0.5, float("-inf")]),)),
    ItemClosed(0, "incomplete", tuple(range(300))),
    ItemClosed(1),
    Cited(0, tools.UrlCitation(0, 3, "https://a.example", "A")),
    ToolStarted(2),
    *(
        ToolProgressed(2, progress)
        for progress in (
            tools.SearchAction("q"),
            tools.OpenPageAction(None),
            tools.FindAction("p", "u"),
            tools.CodeStarted("c"),
            tools.CodeOutput("4"),
            tools.McpProgress("m", 0.5),
        )
    ),
    *(
        ToolOutcome(2, tools.ToolResult("browser.search", "text", False, detail))
        for detail in (
            tools.SearchAction("q", (SOURCE, SOURCE)),
            tools.SearchAction("q"),
            tools.OpenPageAction(None),
            tools.FindAction("p", None),
            tools.PythonDetail("c", "1", "logs"),
            tools.McpDetail("s", "n", "{}", None, "broken"),
        )
    ),
    ToolOutcome(3, tools.McpListing("s", (tools.McpToolInfo("n", None, SCHEMA, {"readOnlyHint": True}),))),
]


def packed(events: list[LogEvent]) -> list[bytes]:
    return [data for event in events if (data := pack(event)) is not None]


def test_every_event_is_equal_after_packing_and_reading() -> None:
    assert read_chunk(join(packed(ALL))) == ALL
    assert {type(event) for event in ALL} == {ItemDelta, *get_args(_NAMED)}, "a class without a case"
    assert pack(TurnEnded("stop", Usage())) is None


async def whole_log(server: Any, response_id: str) -> tuple[Any, list[LogEvent]]:
    stored = await server.state.store.get(response_id, b"")
    found = await server.state.store.background.events(response_id, b"", 0)
    return stored, [event for chunk in found.chunks for event in read_chunk(chunk.data)]


@pytest.mark.parametrize("more", [{}, {"include": ["message.output_text.logprobs"]}])
async def test_live_resumed_and_later_streams_have_the_same_bytes(more: dict[str, Any]) -> None:
    """The bytes do not depend on the batches in which events are written and read."""
    rounds = (f"{THINK}{SEARCH}", PYTHON, ECHO, FINAL)
    async with tools_served(*rounds) as server:
        live = await server.stream(input="x", tools=[WEB, CODE, MCP, TOOL], background=True, **more)
        body = fold_events(parse_sse(live))
        assert [item["type"] for item in body["output"]].count("code_interpreter_call") == 1
        path = f"/v1/responses/{body['id']}?stream=true"
        assert (await server.http.get(path)).content == live
        frames = live.split(b"\n\n")
        for number in range(0, len(frames) - 1, 5):
            resumed = await server.http.get(f"{path}&starting_after={number}")
            assert resumed.content == b"\n\n".join(frames[number + 1 :])
        stored, log = await whole_log(server, body["id"])
        for size in (1, 2, 7, len(log)):
            translator = Translator(ResponseBuilder.of_stored(stored, VOCAB))
            made = translator.start()
            for start in range(0, len(log), size):
                made += translator.feed(log[start : start + size])
            made += translator.finish(stored.to_object())
            assert b"".join(frame(*entry) for entry in made) == live


async def test_a_stream_after_a_crash_begins_with_the_bytes_read_before_it(tmp_path: Path) -> None:
    path = str(tmp_path / "r.sqlite3")

    before: list[bytes] = []
    store = SqliteStore(path, recover=recovery(VOCAB))
    async with serve(Script(ids(HELLO)[:13], hang=True), store=store) as server:
        _, made = await server.post(input="x", background=True, metadata={"a": "b"})
        async with aclosing(follow(server.app.state, made["id"], b"", RenderOptions())) as stream:
            async with asyncio.timeout(10):
                async for frames in stream:
                    before += [frame(*entry) for entry in frames]
                    if b"Hi" in before[-1]:
                        break
        await store.close()  # as if the server had crashed
        await server.app.state.background._abort()  # else the end waits for the response
    again: list[bytes] = []
    for _ in range(2):
        store = SqliteStore(path, recover=recovery(VOCAB))
        async with serve(HELLO, store=store) as server:
            answer = await server.http.get(f"/v1/responses/{made['id']}?stream=true")
            again.append(answer.content)
    assert again[0] == again[1]
    assert again[0].startswith(b"".join(before))
    body = fold_events(parse_sse(again[0]))
    assert (body["status"], body["output"][-1]["status"]) == ("failed", "incomplete")
    assert body["output"][-1]["content"][0]["text"].startswith("Hi")


async def test_the_last_message_of_a_recovered_response_has_no_tokens_to_replay() -> None:
    """The tokens may extend past a stop string that ended the turn. The log does not record where."""
    async with serve(HELLO) as server:
        _, made = await server.post(input="x", background=True)
        await server.ended(made["id"])
        stored, log = await whole_log(server, made["id"])
        assert [bool(item.token_ids) for item in stored.output] == [True, True]
        found, *_ = recovery(VOCAB)(replace(stored, output=()), [join(packed(log))], "failed")
        assert [bool(item.token_ids) for item in found.output] == [True, False]
        assert [item.item for item in found.output] == [item.item for item in stored.output]


async def test_a_resumed_response_keeps_the_fields_of_its_creation(tmp_path: Path) -> None:
    """Another server may have other defaults; the fields that the client has seen must not change."""
    path = str(tmp_path / "r.sqlite3")
    store = SqliteStore(path)
    async with serve(Script([], hang=True), store=store) as server:
        made = (await server.post(input="x", background=True))[1]
        await server.app.state.background.put_back()
    store = SqliteStore(path)
    config = ServerConfig(system_start_date="2026-01-02", default_reasoning_effort="high")
    async with serve(HELLO, store=store, config=config) as server:
        state = server.app.state
        job = await Resumer(state).take(made["id"], state.background.leases.server_id)
        await state.background.launch(job, 1)
        events = parse_sse((await server.http.get(f"/v1/responses/{made['id']}?stream=true")).content)
        assert events[0]["response"] == made
        last = events[-1]["response"]
        same = {key: value for key, value in made.items() if last[key] == value}
        assert made.keys() - same.keys() == {"status", "output", "completed_at", "usage"}


async def test_the_log_of_a_response_is_smaller_than_its_stream() -> None:
    long = "<|channel|>final<|message|>" + "".join(f"{i} words, " for i in range(300)) + "<|return|>"
    async with tools_served(long) as server:
        live = await server.stream(input="x", background=True)
        made = json.loads(live.partition(b"data: ")[2].partition(b"\n")[0])["response"]
        found = await server.state.store.background.events(made["id"], b"", 0)
        assert sum(len(chunk.data) for chunk in found.chunks) < len(live) / 5
