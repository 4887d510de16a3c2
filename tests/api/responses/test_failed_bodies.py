"""The body and events of failed and incomplete responses only have values that the SDK's types allow."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from chorale.api.responses.background.recovery import recovery
from chorale.api.responses.event_log import join, pack, read_chunk
from chorale.api.responses.items.objects import ResponseBuilder
from chorale.api.responses.translate import Translator
from chorale.errors import ChoraleError, ContextLengthError, EngineDeadError, EngineError, QueueFullError
from chorale.store.protocol import RESTARTED
from chorale.turns.events import ItemDelta
from tests.support.engine.scripted_client import Script
from tests.support.responses import STRICT_EVENT, TOOL, VOCAB, fold_events
from tests.support.scripted import call
from tests.support.scripted_tools import tools_served
from tests.support.server import STRICT_RESPONSE
from tests.support.sse import parse_sse
from tests.turns.tools.test_loop import CODE, ECHO, FINAL, MCP, PYTHON, SEARCH, THINK, WEB, ids

CALL = "<|call|>"
PATCH: dict[str, Any] = {"type": "apply_patch"}
SHELL: dict[str, Any] = {"type": "shell", "environment": {"type": "local"}}
LOCAL: dict[str, Any] = {"type": "local_shell"}
NOTE: dict[str, Any] = {"type": "custom", "name": "note"}


LAST_ITEMS = {
    "message": FINAL,
    "function_call": call("get_weather", '{"city":"Paris"}') + CALL,
    "custom_tool_call": call("note", '{"input":"a b c"}') + CALL,
    "apply_patch_call": call("apply_patch", '{"type":"delete_file","path":"a.txt"}') + CALL,
    "shell_call": call("shell", '{"commands":["ls -l","pwd"]}') + CALL,
    "local_shell_call": call("local_shell", '{"command":["ls"]}') + CALL,
    "web_search_call": SEARCH,
    "code_interpreter_call": PYTHON,
    "mcp_call": ECHO,
}
TOOLS = [WEB, CODE, MCP, TOOL, PATCH, SHELL, LOCAL, NOTE]


@pytest.mark.parametrize("kind", LAST_ITEMS)
async def test_an_engine_that_dies_within_an_item_fails_the_response(kind: str) -> None:
    script = ids(THINK + LAST_ITEMS[kind])
    cuts = [Script(script[:end], error=EngineDeadError("gone")) for end in range(1, len(script), 7)]
    async with tools_served(*cuts) as server:
        for _ in cuts:
            body = fold_events(parse_sse(await server.stream(input="x", tools=TOOLS)))
            assert body["status"] == "failed"
            assert body["error"] == {"code": "server_error", "message": "gone"}


@pytest.mark.parametrize("kind", LAST_ITEMS)
async def test_a_token_limit_within_an_item_makes_the_response_incomplete(kind: str) -> None:
    script = ids(THINK + LAST_ITEMS[kind])
    cuts = [Script(script[:end], finish_reason="length") for end in range(1, len(script), 7)]
    async with tools_served(*(cut for cut in cuts for _ in ("stream", "body"))) as server:
        for _ in cuts:
            body = fold_events(parse_sse(await server.stream(input="x", tools=TOOLS)))
            assert body["status"] == "incomplete"
            assert body["incomplete_details"] == {"reason": "max_output_tokens"}
            STRICT_RESPONSE.validate_python(await server.respond(input="x", tools=TOOLS), strict=True)


@pytest.mark.parametrize("kind", LAST_ITEMS)
async def test_a_response_recovered_within_an_item_is_valid(kind: str) -> None:
    """Another server ends the response from the events that were stored before the crash."""
    async with tools_served(THINK + LAST_ITEMS[kind], FINAL) as server:
        made = await server.respond(input="x", tools=TOOLS, background=True)
        await server.state.background.drain()
        found = await server.state.store.background.events(made["id"], b"", 0)
        stored = await server.state.store.get(made["id"], b"")
    log = [event for chunk in found.chunks for event in read_chunk(chunk.data)]
    # Ends between two deltas are skipped, because they differ only in the length of the text.
    deltas = [isinstance(event, ItemDelta) for event in log]
    for end in (end for end in range(len(log)) if not (deltas[end - 1] and deltas[end])):
        stored_events = join([data for event in log[:end] if (data := pack(event)) is not None])
        begun = replace(stored, output=())
        failed, closing, _ = recovery(VOCAB)(begun, [stored_events], "failed")
        translator = Translator(ResponseBuilder.of_stored(failed, VOCAB))
        frames = translator.start() + translator.feed(log[:end] + read_chunk(closing))
        frames += translator.finish(failed.to_object())
        for _, data in frames:
            STRICT_EVENT.validate_json(data, strict=True)
        assert json.loads(frames[-1][1])["response"]["error"] == RESTARTED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("broken"), "server_error"),
        (QueueFullError("full"), "rate_limit_exceeded"),
        (ContextLengthError("too long"), "invalid_prompt"),
        (ChoraleError("who knows", code="response_aborted"), "server_error"),
    ],
)
async def test_each_error_has_a_listed_code_and_its_own_message(error: ChoraleError, code: str) -> None:
    async with tools_served(Script(ids(THINK), error=error)) as server:
        events = parse_sse(await server.stream(input="x"))
        body = fold_events(events)
        assert body["error"] == {"code": code, "message": error.message}
        assert events[-2]["code"] == error.code, "codes of the error event are not limited to a list"
