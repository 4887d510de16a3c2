"""Responses over a WebSocket, with the unmodified OpenAI SDK and with raw clients for the errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
import uvloop
import websockets
from openai import AsyncOpenAI
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter
from starlette.routing import Router, WebSocketRoute
from websockets.asyncio.client import ClientConnection

from chorale.api.http import websocket
from chorale.api.http.auth import authenticate_routes
from chorale.api.http.middleware import HttpMiddleware, unknown_path
from chorale.api.responses.websocket import lanes, socket
from chorale.errors import EngineError
from tests.api.http.test_websocket_turns import opened as plain_socket
from tests.support import PATIENCE
from tests.support.engine.scripted_client import Script, ScriptedClient, ids
from tests.support.event_loop import until
from tests.support.raw_http import call, connect, exchange, handshake
from tests.support.responses import ANSWER, CALL, HELLO, TOOL
from tests.support.scripted import playing
from tests.support.server import Server, listening, make_state
from tests.support.server import served as started
from tests.support.sse import parse_sse

RUN = uvloop.run
ENDS = ("response.completed", "response.failed", "response.incomplete", "error")
STRICT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
Event = dict[str, Any]


def served(client: ScriptedClient | None = None, **config: Any) -> AbstractAsyncContextManager[Server]:
    return started(client or playing(HELLO), listens=True, **config)


@contextlib.asynccontextmanager
async def opened(server: Server, **options: Any) -> AsyncIterator[ClientConnection]:
    async with websockets.connect(
        f"ws://127.0.0.1:{server.port}/v1/responses", max_size=None, **options
    ) as connection:
        yield connection


async def send(connection: ClientConnection, **fields: Any) -> None:
    await connection.send(json.dumps({"type": "response.create", "input": "Hi", **fields}))


async def until_end(connection: ClientConnection) -> list[Event]:
    """Returns the events up to the next terminal one, validated by the SDK's types."""
    events: list[Event] = []
    while not events or events[-1]["type"] not in ENDS:
        message = await asyncio.wait_for(connection.recv(), 20)
        assert isinstance(message, str)
        events.append(json.loads(message))
        STRICT.validate_python(events[-1])
    return events


async def ask(connection: ClientConnection, **fields: Any) -> Event:
    """Sends a request and returns its terminal event."""
    await send(connection, **fields)
    return (await until_end(connection))[-1]


def without_ids(event: Event) -> str:
    text = re.sub(r'"[a-z]{2,4}_[0-9a-f]{32}"', '"id"', json.dumps(event))
    return re.sub(r'_at": \d+', '_at": 0', text)


# --------------------------------------------------------------------------- events and SDKs


@pytest.mark.parametrize("dialect", ["openai", "open-responses", "summary"])
@pytest.mark.parametrize("text", [HELLO, CALL])
async def test_the_events_equal_those_of_the_sse_stream(text: str, dialect: str) -> None:
    async with served(playing(text)) as server:
        header = {"x-responses-dialect": dialect}
        body = {"input": "Hi", "tools": [TOOL], "model": "demo", "store": False}
        sse = await call(server.port, "POST", "/v1/responses", body | {"stream": True}, header)
        expected = parse_sse(sse.body)
        async with opened(server, additional_headers=header) as connection:
            await send(connection, **body)
            found = []
            while not found or found[-1]["type"] not in ENDS:
                found.append(json.loads(await connection.recv()))
        assert list(map(without_ids, found)) == list(map(without_ids, expected))


async def test_lanes_of_the_sdk_run_concurrently() -> None:
    async with served(playing(HELLO, delay=0.01)) as server:
        client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
        limits = ResponsesWebSocketLimits(8, 128, 512, 2**24, 2**25, None)
        async with (
            client,
            client.responses.connect() as connection,
            AsyncResponsesWebSocketSession(connection, limits=limits) as session,
        ):
            named = [session.lane(f"lane-{number}") for number in range(5)]
            for lane in named:
                await lane.send({"type": "response.create", "model": "demo", "input": "Hi"})
            ends = await asyncio.gather(*(lane.get_final_response() for lane in named))
            assert [end.output_text for end in ends] == ["Hi there!"] * 5
            assert len({end.id for end in ends}) == 5


async def test_one_lane_answers_in_order() -> None:
    async with served() as server, opened(server) as connection:
        for number in range(4):
            await send(connection, metadata={"number": str(number)})
        ends = [(await until_end(connection)) for _ in range(4)]
        assert [events[-1]["response"]["metadata"]["number"] for events in ends] == list("0123")
        assert all(events[0]["type"] == "response.created" for events in ends)


# --------------------------------------------------------------------------- conversations


async def test_an_unstored_response_can_be_continued_only_on_its_connection() -> None:
    client = playing(HELLO)
    async with served(client) as server:
        async with opened(server) as connection:
            first = await ask(connection, store=False, input="What I said.")
            second = await ask(connection, store=False, previous_response_id=first["response"]["id"])
            third = await ask(connection, store=False, previous_response_id=second["response"]["id"])
            assert third["response"]["previous_response_id"] == second["response"]["id"]
            prompts = [request.prompt_token_ids for request in client.requests]
            assert len(prompts[0]) < len(prompts[1]) < len(prompts[2])
            assert "What I said." in server.state.vocab.decode(prompts[2])
            # Only the newest response of a lane can be continued.
            gone = await ask(connection, store=False, previous_response_id=first["response"]["id"])
            assert gone["error"]["code"] == "previous_response_not_found"
        async with opened(server) as another:
            gone = await ask(another, store=False, previous_response_id=third["response"]["id"])
            assert (gone["status"], gone["error"]["code"]) == (400, "previous_response_not_found")
            assert gone["error"]["param"] == "previous_response_id"
            assert (await ask(another, store=False))["type"] == "response.completed"


async def test_a_failed_request_drops_the_unstored_response_that_it_continued() -> None:
    async with served() as server, opened(server) as connection:
        first = await ask(connection, store=False)
        previous = first["response"]["id"]
        nothing = [{"type": "function_call_output", "call_id": "call_missing", "output": "x"}]
        failed = await ask(connection, store=False, previous_response_id=previous, input=nothing)
        assert failed["type"] == "error"
        again = await ask(connection, store=False, previous_response_id=previous)
        assert again["error"]["code"] == "previous_response_not_found"


async def test_a_lane_may_continue_a_response_of_another_lane() -> None:
    async with served() as server, opened(server) as connection:
        first = await ask(connection, store=False, stream_id="a")
        assert first["stream_id"] == "a"
        forked = await ask(
            connection, store=False, stream_id="b", previous_response_id=first["response"]["id"]
        )
        assert forked["type"] == "response.completed"


async def test_a_call_can_be_answered_over_the_same_connection() -> None:
    texts = [CALL, ANSWER]
    client = ScriptedClient(lambda request, index: Script(ids(texts[len(client.requests) - 1])))
    async with served(client) as server, opened(server) as connection:
        first = await ask(connection, store=False, tools=[TOOL])
        [made] = [item for item in first["response"]["output"] if item["type"] == "function_call"]
        output = [{"type": "function_call_output", "call_id": made["call_id"], "output": "21"}]
        second = await ask(
            connection, store=False, input=output, previous_response_id=first["response"]["id"]
        )
        assert second["response"]["output"][-1]["content"][0]["text"] == "21 °C in Paris."


async def test_a_stored_response_after_an_unstored_one_can_be_continued_over_http() -> None:
    client = playing(HELLO)
    async with served(client) as server:
        async with opened(server) as connection:
            first = await ask(connection, store=False, input="What I said.")
            second = await ask(connection, store=True, previous_response_id=first["response"]["id"])
        response_id = second["response"]["id"]
        listed = await call(server.port, "GET", f"/v1/responses/{response_id}/input_items?order=asc")
        assert [item["type"] for item in listed.json["data"]] == [
            "message",
            "reasoning",
            "message",
            "message",
        ]
        body = {"input": "And?", "previous_response_id": response_id}
        third = await call(server.port, "POST", "/v1/responses", body)
        assert third.status == 200
        assert "What I said." in server.state.vocab.decode(client.requests[-1].prompt_token_ids)


async def test_an_unstored_response_after_a_stored_one_can_be_continued() -> None:
    client = playing(HELLO)
    async with served(client) as server:
        async with opened(server) as connection:
            first = await ask(connection, store=True, input="What I said.")
            second = await ask(connection, store=False, previous_response_id=first["response"]["id"])
            await ask(connection, store=False, previous_response_id=second["response"]["id"])
        assert "What I said." in server.state.vocab.decode(client.requests[-1].prompt_token_ids)


async def test_a_warm_up_computes_the_prompt_and_can_be_continued() -> None:
    client = playing(HELLO)
    async with served(client) as server, opened(server) as connection:
        await send(connection, store=False, generate=False, input="What I said.", tools=[TOOL])
        events = await until_end(connection)
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = events[-1]["response"]
        assert warm["output"] == []
        assert warm["usage"]["output_tokens"] == 0
        assert warm["usage"]["input_tokens"] == len(client.requests[0].prompt_token_ids)
        assert client.requests[0].sampling.max_tokens == 0
        await ask(connection, store=False, previous_response_id=warm["id"])
        assert "What I said." in server.state.vocab.decode(client.requests[1].prompt_token_ids)
        empty = {"type": "response.create", "instructions": "Be brief.", "generate": False}
        await connection.send(json.dumps(empty))
        assert (await until_end(connection))[-1]["type"] == "response.completed"


# --------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [
        ("{", 400, "invalid_json"),
        ("[]", 400, "invalid_json"),
        (b"{}", 400, "invalid_message"),
        ("[" * 100 + "]" * 100, 400, "json_too_deep"),
        ('{"type": "response.steer", "input": "x"}', 400, "unknown_event_type"),
        ("{}", 400, "unknown_event_type"),
        ('{"type": "response.create"}', 400, "missing_required_parameter"),
        ('{"type": "response.create", "input": "x", "stream": false}', 400, "unsupported_value"),
        ('{"type": "response.create", "input": "x", "background": true}', 400, "unsupported_value"),
        ('{"type": "response.create", "input": "x", "generate": 1}', 400, "invalid_type"),
        ('{"type": "response.create", "input": "x", "stream_id": ""}', 400, "invalid_value"),
        ('{"type": "response.create", "input": "x", "stream_id": 3}', 400, "invalid_value"),
        ('{"type": "response.create", "input": "x", "stream_id": "a b"}', 400, "invalid_value"),
        ('{"type": "response.create", "input": "x", "nonsense": 1}', 400, "unknown_parameter"),
        ('{"type": "response.create", "input": "x", "model": "gpt-x"}', 404, "model_not_found"),
    ],
)
async def test_an_invalid_message_is_an_error_and_the_connection_stays_open(
    message: str | bytes, status: int, code: str
) -> None:
    async with served(unknown_fields="refuse") as server, opened(server) as connection:
        await connection.send(message)
        [error] = await until_end(connection)
        assert (error["type"], error["status"], error["error"]["code"]) == ("error", status, code)
        assert (await ask(connection, stream=True, background=False))["type"] == "response.completed"


async def test_a_full_queue_is_an_error_with_retry_after() -> None:
    client = playing(HELLO)
    client.max_in_flight = 0
    async with served(client) as server, opened(server) as connection:
        error = await ask(connection, stream_id="a")
        assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
        assert error["error"]["headers"] == {"retry-after": "1"}
        assert error["stream_id"] == "a"


async def test_lanes_are_admitted_like_separate_requests() -> None:
    """A request over the limit is refused immediately; the others and the connection continue."""
    begun, whole = ids(HELLO.partition("Hi")[0]), ids(HELLO)
    client = ScriptedClient(
        lambda request, index: Script(begun, hang=True) if len(client.requests) <= 2 else Script(whole)
    )
    client.max_in_flight = 2
    async with served(client) as server:
        async with opened(server) as connection:
            for lane in ("a", "b", "c"):
                await send(connection, stream_id=lane)
            error = (await until_end(connection))[-1]  # the running lanes never end
            assert (error["type"], error["status"], error["stream_id"]) == ("error", 429, "c")
            assert client.num_in_flight == 2
            client.max_in_flight = 3
            assert (await ask(connection, stream_id="c"))["type"] == "response.completed"
        await until(lambda: client.num_in_flight == 0)


async def test_a_failed_response_has_one_terminal_event() -> None:
    client = playing(HELLO.partition("Hi")[0], error=EngineError("it broke"))
    async with served(client) as server, opened(server) as connection:
        for _ in range(2):
            failed = await ask(connection, store=False)
            assert failed["type"] == "response.failed"
            assert failed["response"]["error"]["message"] == "it broke"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.recv(), 0.2)


async def test_lanes_and_waiting_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_LANES", 3)
    monkeypatch.setattr(lanes, "MAX_WAITING", 4)
    monkeypatch.setattr(lanes, "MAX_RUNNING", 2)
    client = playing(HELLO[:40], hang=True)
    async with served(client) as server, opened(server) as connection:
        for name in "abc":
            await send(connection, stream_id=name)
        await send(connection, stream_id="d")
        codes: list[str] = []
        while not codes:
            event = json.loads(await connection.recv())
            codes += [event["error"]["code"]] if event["type"] == "error" else []
        assert codes == ["websocket_stream_limit_reached"]
        for _ in range(6):
            await send(connection, stream_id="a")
        while len(codes) < 4:
            event = json.loads(await connection.recv())
            codes += [event["error"]["code"]] if event["type"] == "error" else []
        assert codes[1:] == ["rate_limit_exceeded"] * 3
        assert len(client.requests) == 2


# --------------------------------------------------------------------------- the handshake


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (b"/v1/responses", b"", 101),
        (b"/v1/responses", b"origin: http://localhost\r\n", 101),
        (b"/v1/responses", b"origin: https://localhost\r\n", 101),
        (b"/v1/responses", b"origin: http://evil.example\r\n", 403),
        (b"/v1/responses", b"origin: http://localhost:99\r\n", 403),
        (b"/v1/responses", b"origin: null\r\n", 403),
        (b"/v1/responses", b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n", 400),
        (b"/v1/responses", b"sec-websocket-version: 8\r\n", 400),
        (b"/v1/responses", b"x-responses-dialect: nonsense\r\n", 400),
        (b"/v1/responses", b"x: " + b"a" * 20_000 + b"\r\n", 101),
        (b"/v1/responses/", b"", 404),
        (b"/health", b"", 404),
        (b"http://evil.example/v1/responses", b"", 400),
    ],
)
async def test_handshakes_are_checked(path: bytes, headers: bytes, status: int) -> None:
    async with served() as server:
        answer = await exchange(server.port, handshake(headers, path))
        assert answer.status == status
        if status != 101:
            assert answer.json["error"]["message"]
            assert answer.headers["connection"] == "close"


async def test_allowed_origins_are_accepted_and_other_hosts_are_refused() -> None:
    async with served(allowed_origins=("http://app.example",)) as server:
        raw = handshake(b"origin: http://app.example\r\n")
        assert (await exchange(server.port, raw)).status == 101
        raw = handshake(b"origin: http://evil.example\r\n")
        assert (await exchange(server.port, raw)).code == "origin_not_allowed"
    async with served() as server:
        raw = handshake().replace(b"host: localhost", b"host: evil.example")
        assert (await exchange(server.port, raw)).code == "invalid_host"


async def test_the_root_path_and_the_request_id_are_honoured() -> None:
    async with served(root_path="/prefix") as server:
        raw = handshake(b"x-request-id: mine\r\n", b"/prefix/v1/responses")
        answer = await exchange(server.port, raw)
        assert answer.status == 101
        assert answer.headers["x-request-id"] == "mine"


async def test_a_get_without_upgrade_is_a_405_and_a_post_ignores_the_upgrade() -> None:
    async with served() as server:
        assert (await call(server.port, "GET", "/v1/responses")).status == 405
        offer = {"connection": "upgrade", "upgrade": "websocket"}
        posted = await call(server.port, "POST", "/v1/responses", {"input": "Hi"}, offer)
        assert posted.status == 200


async def test_too_many_connections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "MAX_CONNECTIONS", 1)
    async with served() as server:
        async with opened(server):
            answer = await exchange(server.port, handshake())
            assert answer.status == 429
            assert answer.headers["retry-after"] == "5"
        async with opened(server) as connection:
            assert (await ask(connection))["type"] == "response.completed"


# --------------------------------------------------------------------------- bounds and ends


async def test_nothing_is_compressed() -> None:
    async with served() as server, opened(server) as connection:  # the client offers permessage-deflate
        assert connection.protocol.extensions == []


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (bytes([0x81, 0xFF]) + (16 * 2**20 + 1).to_bytes(8, "big") + bytes(4), 1009),
        (bytes([0x81, 0x82]) + bytes(4) + b"\xff\xfe", 1007),
        (bytes([0x81, 0x02]) + b"{}", 1002),  # not masked
        (bytes([0xC1, 0x82]) + bytes(4) + b"{}", 1002),  # compressed
        (bytes([0x01, 0x82]) + bytes(4) + b"{}", 1008),  # a message that never ends
    ],
)
async def test_protocol_violations_close_the_connection_with_their_code(frame: bytes, code: int) -> None:
    async with served(body_timeout=0.3) as server:
        answer = await asyncio.to_thread(answer_to, server.port, frame)
        opcode, size = answer[:2]
        assert opcode == 0x88
        assert len(answer) == 2 + size
        assert int.from_bytes(answer[2:4], "big") == code
        await until(lambda: server.state.lifecycle.sockets.total == 0)


def answer_to(port: int, frame: bytes) -> bytes:
    """Returns everything that the server sends after the handshake.

    Uses a plain socket: the connection can be reset while the server has not read all of ``frame``, and then
    asyncio's reader raises although the answer has arrived.
    """
    found = b""
    with plain_socket(port) as connection, contextlib.suppress(ConnectionError):
        with contextlib.suppress(ConnectionError):
            connection.sendall(frame)
        while part := connection.recv(4096):
            found += part
    return found


async def test_a_disconnect_aborts_the_generations_of_the_connection() -> None:
    client = playing(HELLO[:40], hang=True)
    async with served(client) as server:
        async with opened(server) as connection:
            for name in "ab":
                await send(connection, stream_id=name)
            while len(client.requests) < 2:
                await connection.recv()
            assert server.state.lifecycle.num_requests == 2
            connection.transport.abort()
        life = server.state.lifecycle
        await until(lambda: (len(client.aborted), life.num_requests, life.sockets.total) == (2, 0, 0))


async def test_a_drain_lets_running_responses_finish() -> None:
    client = playing(HELLO, delay=0.03)
    async with served(client) as server, opened(server) as idle, opened(server) as connection:
        await send(connection)
        await send(connection)
        assert json.loads(await connection.recv())["type"] == "response.created"
        server.stop()
        refused, ended = None, []
        while not (refused and ended):
            event = json.loads(await asyncio.wait_for(connection.recv(), PATIENCE))
            refused = event if event["type"] == "error" else refused
            ended += [event] if event["type"] == "response.completed" else []
        assert (refused["status"], refused["error"]["code"]) == (503, "server_shutting_down")
        for each in (idle, connection):
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await asyncio.wait_for(each.recv(), PATIENCE)
            assert closed.value.rcvd.code == 1001
        await asyncio.wait_for(server.task, PATIENCE)


async def test_a_forced_stop_ends_running_responses_with_a_failed_event() -> None:
    async with served(playing(HELLO[:40], hang=True)) as server, opened(server) as connection:
        await send(connection)
        assert json.loads(await connection.recv())["type"] == "response.created"
        server.stop()
        server.stop()
        assert (await until_end(connection))[-1]["type"] == "response.failed"
        await asyncio.wait_for(server.task, PATIENCE)


async def test_a_connection_is_closed_at_its_maximum_age() -> None:
    client = playing(HELLO, delay=0.05)
    async with make_state(client) as state:
        serve = partial(socket.serve, state, max_seconds=0.2)
        routes = authenticate_routes([WebSocketRoute("/v1/responses", serve)], ())
        app = HttpMiddleware(Router(routes, redirect_slashes=False, default=unknown_path), state)
        async with listening(app) as server, opened(server) as connection:
            await send(connection)
            events = await until_end(connection)
            assert events[-1]["type"] == "response.completed"  # running responses may finish
            [error] = await until_end(connection)
            assert error["error"]["code"] == "websocket_connection_limit_reached"
            with pytest.raises(websockets.ConnectionClosedOK):
                await connection.recv()


async def test_a_silent_client_is_pinged_and_then_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.05)
    monkeypatch.setattr(websocket, "SILENCE_SECONDS", 0.5)
    async with served() as server, opened(server) as polite:
        reader, writer = await connect(server.port)  # this client never answers pings
        writer.write(handshake())
        await reader.readuntil(b"\r\n\r\n")
        data = await asyncio.wait_for(reader.read(), PATIENCE)
        assert data.startswith(b"\x89\x00\x89\x00")
        assert b"\x03\xf3no answer to pings" in data  # 1011
        assert (await ask(polite))["type"] == "response.completed"


async def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "WRITE_TIMEOUT_SECONDS", 0.3)
    client = playing("<|channel|>final<|message|>" + "word " * 20_000)
    async with served(client) as server:
        reader, writer = await connect(server.port, limit=1024)
        writer.write(handshake())
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        text = b'{"type":"response.create","input":"Hi","stream_id":"%d"}'
        for number in range(10, 26):
            message = text % number
            writer.write(bytes([0x81, 0x80 | len(message), 0, 0, 0, 0]) + message)
        life = server.state.lifecycle
        await until(lambda: client.requests and (life.num_requests, life.sockets.total) == (0, 0))


async def test_requests_of_a_connection_are_counted() -> None:
    async with served() as server:
        async with opened(server) as connection:
            await ask(connection)
            await ask(connection, n=2)
        text = server.state.metrics.render().decode()
        counted = 'http_requests_total{handler="/v1/responses",method="WEBSOCKET",status="%dxx"} 1.0'
        assert counted % 2 in text
        assert counted % 4 in text
