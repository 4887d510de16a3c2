"""Requests that make the server send every kind of answer, item and event at least once."""

from __future__ import annotations

from typing import Any

from tests.support.server import Server
from tests.support.wire.chat_scenarios import chat, chat_stored, completions, messages
from tests.support.wire.recorder import Recorder
from tests.support.wire.responses_scenarios import (
    conversations,
    responses_background,
    responses_client_tools,
    responses_compaction,
    responses_items,
    responses_server_tools,
    responses_text,
)
from tests.support.wire.server import KEY, MODEL, post, served
from tests.support.wire.words import CHAT, CHAT_HI, CONVERSATIONS, MESSAGES, RESPONSES, Scenario


async def models(server: Server) -> None:
    await server.ask("GET", "/v1/models")
    await server.ask("GET", "/v1/models/alias")


FAULTY: tuple[dict[str, Any], ...] = (
    {"temperature": 9}, {"nonsense": 1}, {"model": "gpt-9"}, {"max_tokens": -1}, {"tools": [{"type": "x"}]},
)  # fmt: skip


async def errors(server: Server) -> None:
    for path in (CHAT, "/v1/completions", RESPONSES, MESSAGES, f"{RESPONSES}/compact"):
        for fields in FAULTY:
            needs = {"messages": CHAT_HI, "max_tokens": 9} if path in (CHAT, MESSAGES) else {"input": "hi"}
            needs = {"prompt": "hi"} if path == "/v1/completions" else needs
            answer = await server.http.post(path, json={"model": MODEL, **needs, **fields})
            assert 400 <= answer.status_code < 500, (path, fields, answer.text)
        await server.http.post(path, content=b"{")
        await server.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
        await server.http.put(path)
    for path in (f"{RESPONSES}/resp_0", f"{CONVERSATIONS}/conv_0", "/v1/nothing", "/v1/models/gpt-9"):
        await server.ask("GET", path, 404)
    server.client.max_in_flight = 0
    for path, fields in ((CHAT, {"messages": CHAT_HI}), (RESPONSES, {"input": "hi"})):
        await post(server, path, 429, **fields)
        await post(server, path, 429, stream=True, **fields)
    await post(server, MESSAGES, 429, messages=CHAT_HI, max_tokens=9)


async def unauthorized(server: Server) -> None:
    for path in (CHAT, RESPONSES, MESSAGES):
        await post(server, path, 401)
    headers = {"authorization": f"Bearer {KEY}"}
    assert (await server.http.get("/v1/models", headers=headers)).status_code == 200


ALL: tuple[Scenario, ...] = (
    chat, chat_stored, completions, responses_text, responses_client_tools, responses_server_tools,
    responses_background, responses_compaction, responses_items, conversations, messages, models, errors,
)  # fmt: skip
IN_DIALECTS = tuple(
    scenario for scenario in ALL if scenario.__name__.startswith(("responses", "conversations"))
)


async def record() -> Recorder:
    """Run all scenarios."""
    recorder = Recorder()
    for dialect in ("openai", "open-responses", "summary"):
        for scenario in ALL if dialect == "openai" else IN_DIALECTS:
            recorder.scenario = scenario.__name__
            unknown = "refuse" if scenario is errors else "warn"
            async with served(recorder, dialect, unknown_fields=unknown) as server:
                await scenario(server)
    for name in ("reasoning", "reasoning_content", "both"):
        recorder.scenario = f"chat with {name}"
        async with served(recorder, reasoning_field=name) as server:
            await chat(server)
    recorder.scenario = "unauthorized"
    async with served(recorder, keys=True) as server:
        await unauthorized(server)
    return recorder
