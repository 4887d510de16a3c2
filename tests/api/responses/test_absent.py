"""Optional fields, which are left out or empty unless requested, and the forms of each dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chorale.errors import EngineDeadError
from tests.support.engine.scripted_client import Script, ids
from tests.support.responses import CALL, HELLO, TOOL, fold_events, serve
from tests.support.sse import parse_sse

DIALECTS = ("openai", "open-responses", "summary")
SEALED = "encrypted_content"
GIVEN: dict[str, Any] = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}


def reasoning_items(value: Any) -> list[dict[str, Any]]:
    """Returns all reasoning items within a JSON value."""
    if isinstance(value, list):
        return [item for entry in value for item in reasoning_items(entry)]
    if not isinstance(value, dict):
        return []
    own = [value] if value.get("type") == "reasoning" else []
    return own + [item for entry in value.values() for item in reasoning_items(entry)]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_reasoning_has_encrypted_content_only_on_request(dialect: str) -> None:
    headers = {"x-responses-dialect": dialect}
    async with serve(HELLO) as server:
        answer = await server.http.post("/v1/responses", json={"input": "hi"}, headers=headers)
        body = answer.json()
        ask = {"input": [*body["output"], GIVEN, {**GIVEN, SEALED: None}, {"role": "user", "content": "hi"}]}
        again = (await server.http.post("/v1/responses", json=ask, headers=headers)).json()
        listed = await server.http.get(f"/v1/responses/{again['id']}/input_items", headers=headers)
        stream = {"input": "hi", "stream": True}
        streamed = await server.http.post("/v1/responses", json=stream, headers=headers)
        shown = [*map(reasoning_items, (body, again, listed.json(), parse_sse(streamed.content)))]
        assert [len(items) for items in shown] == [1, 1, 3, 3]
        assert not any(SEALED in item for items in shown for item in items)
        asking = {**stream, "include": [f"reasoning.{SEALED}"]}
        streamed = await server.http.post("/v1/responses", json=asking, headers=headers)
        assert SEALED in reasoning_items(parse_sse(streamed.content)[-1])[0]


async def test_reasoning_has_a_summary_only_on_request() -> None:
    """OpenAI returns summaries only on request; clients that show only summaries request them."""
    async with serve(CALL, HELLO, HELLO, HELLO) as server:
        ask = {"input": "hi", "tools": [TOOL], "reasoning": {"summary": "auto"}}
        events = await server.events(**ask)
        kinds = [event["type"] for event in events]
        assert "response.reasoning_summary_text.delta" in kinds
        assert not any("reasoning_text" in kind for kind in kinds)
        body = events[-1]["response"]
        assert body["output"][0]["summary"] == [{"type": "summary_text", "text": "Need weather."}]
        assert (await server.http.get(f"/v1/responses/{body['id']}")).json()["output"] == body["output"]
        _, plain = await server.post(input="hi")
        assert plain["output"][0]["summary"] == []
        older = {"reasoning": {"generate_summary": "concise"}}
        _, body = await server.post(input="hi", **older)
        assert body["output"][0]["summary"] == [{"type": "summary_text", "text": "Say hi."}]
        assert body["reasoning"]["summary"] == "concise"
        # Items with a summary can be sent back.
        last = await server.respond(input=[*body["output"], {"role": "user", "content": "go on"}])
        assert last["status"] == "completed"


async def test_a_background_response_streams_the_requested_summary() -> None:
    async with serve(HELLO) as server:
        made = (await server.post(input="hi", background=True, reasoning={"summary": "auto"}))[1]
        streamed = await server.http.get(f"/v1/responses/{made['id']}?stream=true")
        events = parse_sse(streamed.content)
        assert "response.reasoning_summary_text.done" in [event["type"] for event in events]
        assert events[-1]["response"]["output"][0]["summary"][0]["text"] == "Say hi."
        other = {"x-responses-dialect": "open-responses"}
        streamed = await server.http.get(f"/v1/responses/{made['id']}?stream=true", headers=other)
        assert b"event: response.reasoning.delta" in streamed.content
        plain = (await server.post(input="hi", background=True))[1]
        streamed = await server.http.get(f"/v1/responses/{plain['id']}?stream=true")
        assert fold_events(parse_sse(streamed.content))["output"][0]["summary"] == []


async def test_open_responses_nests_the_fields_of_the_error_event() -> None:
    async with serve(Script(ids(HELLO)[:3], error=EngineDeadError("it died"))) as server:
        ask = {"input": "hi", "stream": True}
        headers = {"x-responses-dialect": "open-responses"}
        for spoken, has_payload in (({}, False), (headers, True)):
            answer = await server.http.post("/v1/responses", json=ask, headers=spoken)
            [event] = [event for event in parse_sse(answer.content) if event["type"] == "error"]
            told = event["error"] if has_payload else event
            assert told["message"] == "it died"
            assert (told["code"], told["param"]) == ("engine_restarted", None)
            if has_payload:
                assert set(event) == {"type", "error", "sequence_number"}
                assert told["type"] == "server_error"
            assert json.dumps(event).count("it died") == 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_only_open_responses_streams_end_with_done(dialect: str) -> None:
    """The Open Responses specification requires the string; OpenAI's streams end with the last event."""
    headers = {"x-responses-dialect": dialect}
    async with serve(HELLO) as server:
        posted = await server.http.post(
            "/v1/responses", json={"input": "hi", "stream": True}, headers=headers
        )
        made = (await server.post(input="hi", background=True))[1]
        resumed = await server.http.get(f"/v1/responses/{made['id']}?stream=true", headers=headers)
        for answer in (posted, resumed):
            assert answer.content.endswith(b"\n\ndata: [DONE]\n\n") == (dialect == "open-responses")
            assert parse_sse(answer.content)[-1]["type"] == "response.completed"


async def test_an_unknown_dialect_is_refused() -> None:
    async with serve(HELLO) as server:
        headers = {"x-responses-dialect": "klingon"}
        assert (
            await server.http.post("/v1/responses", json={"input": "x"}, headers=headers)
        ).status_code == 400


async def test_the_format_is_echoed_with_strict() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    async with serve("<|channel|>final<|message|>{}<|return|>") as server:
        for given, echoed in (({}, False), ({"strict": None}, False), ({"strict": True}, True)):
            form = {"type": "json_schema", "name": "a", "schema": schema, **given}
            body = await server.respond(input="hi", text={"format": form})
            assert body["text"]["format"]["strict"] is echoed
