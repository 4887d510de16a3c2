"""Background responses: polling, resumed streams, cancellation, limits, and SIGTERM while they run."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import openai
import pytest

from chorale.api.app import create_app
from chorale.config.engine import ServerConfig, hash_key
from chorale.errors import EngineDeadError
from chorale.jobs.background import STOPPED
from chorale.store.store import SqliteStore
from tests.support import PATIENCE
from tests.support.engine.scripted_client import Script, ScriptedClient, ids
from tests.support.event_loop import until
from tests.support.raw_http import call
from tests.support.responses import HELLO, MODEL, fold_events, serve
from tests.support.server import Server, listening, make_state
from tests.support.sse import parse_sse

SLOW = Script(ids(HELLO), delay=0.01)
HANGS = Script(ids(HELLO)[:8], hang=True)


async def resume(server: Server, response_id: str, **query: Any) -> list[dict[str, Any]]:
    answer = await server.http.get(f"/v1/responses/{response_id}", params={"stream": "true", **query})
    assert answer.status_code == 200, answer.text
    content = answer.content.removeprefix(b": waiting\n\n")
    return parse_sse(content, query.get("starting_after", -1) + 1)


async def test_a_background_response_is_queued_and_polled_to_its_end() -> None:
    async with serve(SLOW) as server:
        made = await server.sdk.responses.create(model=MODEL, input="hello", background=True)
        assert made.status == "queued"
        assert made.background is True
        body = await server.ended(made.id)
        assert body["status"] == "completed"
        assert body["output"][1]["content"][0]["text"] == "Hi there!"
        assert body["usage"]["output_tokens"] == len(ids(HELLO))
        assert body["completed_at"] >= body["created_at"]
        follow_up = await server.sdk.responses.create(
            model=MODEL, input="again", previous_response_id=made.id
        )
        assert follow_up.status == "completed"
        assert "Hi there!" in server.prompt(1)


async def test_a_stream_can_be_resumed_after_every_event_live_and_later() -> None:
    async with serve(SLOW) as server:
        stream = await server.sdk.responses.create(model=MODEL, input="hello", background=True, stream=True)
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.reasoning_text.delta":
                break
        await stream.close()  # the response continues without its client
        response_id = seen[0].response.id
        number = seen[-1].sequence_number
        live = await resume(server, response_id, starting_after=number)
        assert live[0]["sequence_number"] == number + 1
        assert live[-1]["type"] == "response.completed"
        whole = await resume(server, response_id)
        body = fold_events(copy.deepcopy(whole))
        assert body == (await server.http.get(f"/v1/responses/{response_id}")).json()
        assert [event["type"] for event in whole[:3]] == [
            "response.created", "response.queued", "response.in_progress",
        ]  # fmt: skip
        assert [event["response"]["status"] for event in whole[:3]] == ["queued", "queued", "in_progress"]
        assert whole[number + 1 :] == live
        for after in range(-1, len(whole)):
            query = {} if after < 0 else {"starting_after": after}
            assert await resume(server, response_id, **query) == whole[after + 1 :]


async def test_cancel_keeps_the_output_and_is_idempotent() -> None:
    async with serve(HANGS) as server:
        made = await server.sdk.responses.create(model=MODEL, input="hello", background=True)
        reading = asyncio.create_task(resume(server, made.id))
        while (await server.sdk.responses.retrieve(made.id)).status != "in_progress":
            await asyncio.sleep(0.01)
        cancelled = await server.sdk.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        assert cancelled.output[0].type == "reasoning"
        assert server.client.aborted == [made.id]
        assert await server.sdk.responses.cancel(made.id) == cancelled
        assert await server.sdk.responses.retrieve(made.id) == cancelled
        events = await reading
        assert events[-1]["type"] == "response.incomplete"
        assert fold_events(events)["status"] == "cancelled"
        assert server.app.state.background.num_running == 0


async def test_a_cancelled_response_stays_cancelled_when_its_server_stops() -> None:
    """The client has been told about the cancellation, so the stop must not change it to a failure."""
    async with serve(HANGS) as server:
        made = await server.sdk.responses.create(model=MODEL, input="hello", background=True)
        job = server.app.state.background.find(made.id)
        job.stop()
        job.stop(EngineDeadError("the server stops"))
        async with asyncio.timeout(30):
            await job.ended()
        body = await server.sdk.responses.retrieve(made.id)
        assert (body.status, body.error) == ("cancelled", None)


async def test_a_queued_response_can_be_cancelled() -> None:
    async with serve(Script([], hang=True, delay=30)) as server:
        made = await server.sdk.responses.create(model=MODEL, input="hello", background=True)
        assert (await server.sdk.responses.cancel(made.id)).status == "cancelled"
        events = await resume(server, made.id)
        assert [event["type"] for event in events] == [
            "response.created", "response.queued", "response.incomplete",
        ]  # fmt: skip
        assert events[-1]["response"]["output"] == []


async def test_invalid_cancels_and_resumes_are_refused() -> None:
    async with serve(HELLO) as server:
        _, body = await server.post(input="hello")
        with pytest.raises(openai.BadRequestError):
            await server.sdk.responses.cancel(body["id"])
        with pytest.raises(openai.BadRequestError) as caught:
            await server.sdk.responses.retrieve(body["id"], stream=True)
        assert caught.value.param == "stream"
        unknown = "resp_" + "0" * 32
        for method, path in (("POST", f"{unknown}/cancel"), ("GET", f"{unknown}?stream=true")):
            answer = await server.http.request(method, f"/v1/responses/{path}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
        for query in ("stream=maybe", "starting_after=-1", "starting_after=x", "include=x"):
            answer = await server.http.get(f"/v1/responses/{body['id']}?{query}")
            assert answer.status_code == 400, query
        answer = await server.http.get(f"/v1/responses/{body['id']}?stream=true&starting_after=-1")
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("starting_after", "invalid_value")
        status, refused = await server.post(input="x", background=True, store=False)
        assert (status, refused["error"]["param"]) == (400, "background")


async def test_responses_above_the_limit_are_refused_and_not_stored() -> None:
    config = ServerConfig(system_start_date="2026-01-02", max_background_responses=2)
    async with serve(HANGS, config=config) as server:
        kept = [await server.post(input="x", background=True) for _ in range(2)]
        status, body = await server.post(input="x", background=True)
        assert status == 429
        assert body["error"]["code"] == "rate_limit_exceeded"
        await server.sdk.responses.cancel(kept[0][1]["id"])
        assert (await server.post(input="x", background=True))[0] == 200
    async with serve(HANGS, key_hashes=(hash_key("a"), hash_key("b")), config=config) as server:
        for key, status in (("a", 200), ("a", 200), ("a", 429), ("b", 200), ("b", 429)):
            answer = await server.http.post(
                "/v1/responses",
                json={"input": "x", "background": True},
                headers={"authorization": f"Bearer {key}"},
            )
            assert answer.status_code == status, "the second key still gets its half of the limit"
    async with serve(HANGS, max_in_flight=1) as server:  # the queue of the engine is full
        assert (await server.post(input="x", background=True))[0] == 200
        assert (await server.post(input="x", background=True))[0] == 429
        assert (await server.store.stats()).num_responses == 1


async def test_delete_stops_the_turn_and_ends_streams_with_an_error() -> None:
    """Otherwise the stream would look like a broken connection, which clients resume."""
    async with serve(HANGS) as server:
        made = await server.sdk.responses.create(model=MODEL, input="hello", background=True)
        reader = asyncio.create_task(server.http.get(f"/v1/responses/{made.id}", params={"stream": "true"}))
        await until(lambda: server.client.requests)
        await asyncio.sleep(0.2)
        await server.sdk.responses.delete(made.id)
        async with asyncio.timeout(10):
            answer = await reader
        *before, last = parse_sse(answer.content.removeprefix(b": waiting\n\n"))
        assert (last["type"], last["code"]) == ("error", "response_deleted")
        assert not any(event["type"] == "error" for event in before)
        await server.app.state.background.drain()
        assert server.client.aborted == [made.id]
        with pytest.raises(openai.NotFoundError):
            await server.sdk.responses.retrieve(made.id)


async def test_a_response_that_has_not_ended_cannot_be_continued() -> None:
    async with serve(HANGS) as server:
        made = await server.sdk.responses.create(model=MODEL, input="hello", background=True)
        status, body = await server.post(input="more", previous_response_id=made.id)
        assert (status, body["error"]["code"]) == (400, "previous_response_not_ended")


async def test_a_server_stop_fails_responses_that_cannot_be_resumed() -> None:
    store = SqliteStore()
    async with serve(HANGS, store=store) as server:
        made = await server.sdk.responses.create(model=MODEL, input="hello", background=True)
        while (await server.sdk.responses.retrieve(made.id)).status != "in_progress":
            await asyncio.sleep(0.01)
        await store.background.settle(made.id, b"")  # a reader has its events, so it cannot be resumed
        await server.app.state.background.close()
        body = (await server.sdk.responses.retrieve(made.id)).to_dict()
        assert body["status"] == "failed"
        assert body["error"] == {"code": "server_error", "message": STOPPED}
        assert await store.jobs.servers() == {}
        assert fold_events(await resume(server, made.id))["status"] == "failed"


async def test_obfuscation_pads_deltas_and_changes_nothing_else() -> None:
    async with serve(HELLO) as server:
        made = await server.sdk.responses.create(model=MODEL, input="hello", background=True)
        await server.ended(made.id)
        plain = await resume(server, made.id)
        answer = await server.http.get(f"/v1/responses/{made.id}?stream=true&include_obfuscation=true")
        frames = [f for f in answer.content.split(b"\n\n") if f.split(b"\n")[0].endswith(b".delta")]
        assert frames
        assert {len(frame) % 64 for frame in frames} == {0}
        hidden = parse_sse(answer.content)
        for event in hidden:
            assert ("obfuscation" in event) == event["type"].endswith(".delta")
            event.pop("obfuscation", None)
        assert hidden == plain
        streamed = await server.http.post(
            "/v1/responses",
            json={"input": "x", "stream": True, "stream_options": {"include_obfuscation": True}},
        )
        assert b'"obfuscation":"' in streamed.content
        fold_events(parse_sse(streamed.content))


@pytest.mark.parametrize(
    ("script", "hurry", "status"),
    [
        (Script(ids(HELLO), delay=0.02), False, "completed"),
        (Script(ids(HELLO)[:8], hang=True), False, "queued"),
        (Script(ids(HELLO)[:8], hang=True), True, "queued"),
    ],
)
async def test_a_drain_finishes_or_requeues(tmp_path: Path, script: Script, hurry: bool, status: str) -> None:
    store = str(tmp_path / "responses.sqlite3")
    client = ScriptedClient(lambda request, index: script)
    timeout = 60.0 if status == "completed" or hurry else 0.3
    async with make_state(client, response_store=store, shutdown_timeout=timeout) as state:
        async with listening(create_app(state)) as server:
            made = await call(server.port, "POST", "/v1/responses", {"input": "x", "background": True})
            assert made.json["status"] == "queued"
            await asyncio.sleep(0.1)
            server.stop()
            if hurry:
                server.stop()
            await asyncio.wait_for(server.task, PATIENCE)
        reopened = SqliteStore(store)  # as another process would
        found = await reopened.get(made.json["id"], b"")
        assert found.status == status
        assert found.body["error"] is None
        assert (await reopened.background.waiting() != []) == (status == "queued")
        assert await reopened.jobs.servers() == {}
        await reopened.close()
