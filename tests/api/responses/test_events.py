"""What a stream's events contain; ``items/test_built_in_events.py`` tests their order."""

from __future__ import annotations

from chorale.errors import EngineDeadError
from tests.support.engine.scripted_client import Script, ids
from tests.support.responses import CALL, HELLO, TOOL, fold_events, serve, without_ids


async def test_a_call_streams_its_arguments() -> None:
    async with serve(CALL) as server:
        events = await server.events(input="weather?", tools=[TOOL])
        body = fold_events(events)
        call = body["output"][1]
        assert call["type"] == "function_call"
        assert (call["name"], call["arguments"]) == ("get_weather", '{"city":"Paris"}')
        assert call["id"].startswith("fc_")
        assert call["call_id"].startswith("call_")
        deltas = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
        assert len(deltas) > 1


async def test_an_engine_that_dies_ends_the_stream() -> None:
    dead = EngineDeadError("the engine was restarted", retry_after=1)
    script = Script(ids(HELLO)[:7], error=dead)
    async with serve(script) as server:
        events = await server.events(input="go")
        body = fold_events(events)
        assert events[-1]["type"] == "response.failed"
        assert body["status"] == "failed"
        assert body["error"] == {"code": "server_error", "message": "the engine was restarted"}
        assert events[-2]["type"] == "error"
        assert events[-2]["code"] == "engine_restarted"
        assert "error" not in events[-2]
        assert {item["status"] for item in body["output"]} <= {"completed", "incomplete"}
        stored = await server.http.get(f"/v1/responses/{body['id']}")
        assert stored.json() == body
        status, error = await server.post(input="go")
        assert status == 503
        assert error["error"]["code"] == "engine_restarted"


async def test_an_engine_that_dies_before_the_first_token_fails_the_response() -> None:
    script = Script([], error=EngineDeadError("gone"))
    async with serve(script) as server:
        body = fold_events(await server.events(input="go"))
        assert (body["status"], body["output"]) == ("failed", [])


async def test_log_probabilities_are_returned_on_request() -> None:
    include = ["message.output_text.logprobs"]
    async with serve(HELLO) as server:
        events = await server.events(input="go", include=include, top_logprobs=1)
        body = fold_events(events)
        part = body["output"][1]["content"][0]
        assert "".join(entry["token"] for entry in part["logprobs"]) == "Hi there!"
        assert part["logprobs"][0]["top_logprobs"][0]["logprob"] == -0.5
        assert bytes(part["logprobs"][0]["bytes"]) == b"Hi"
        assert "logprobs" not in body["output"][0]["content"][0]
        _, whole = await server.post(input="go", include=include, top_logprobs=1)
        assert without_ids(whole) == without_ids(body)
        assert server.client.requests[-1].sampling.logprobs == 1
        await server.post(input="go", top_logprobs=3)
        assert server.client.requests[-1].sampling.logprobs is None


async def test_reasoning_can_be_hidden() -> None:
    async with serve(HELLO) as server:
        body = fold_events(await server.events(input="go", include_reasoning=False))
        assert [item["type"] for item in body["output"]] == ["message"]
        _, whole = await server.post(input="go", include_reasoning=False)
        assert without_ids(whole) == without_ids(body)
