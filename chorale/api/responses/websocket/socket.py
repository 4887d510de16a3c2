"""GET /v1/responses with an upgrade: OpenAI's WebSocket mode, with any number of responses per connection.

A client sends ``{"type": "response.create", ...}`` with the fields of the HTTP body, and receives the events
of the SSE stream as text messages. Differences from HTTP: an error before a response begins is an ``error``
event with the HTTP status; a failed response ends with ``response.failed`` alone, so each request has exactly
one terminal event; the first event lists ignored fields in ``warnings``; the newest response of each
lane can be continued even if it is not stored; ``generate: false`` only fills the prefix cache.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send

from chorale.api.http.body import THREAD_BYTES, parse_bytes
from chorale.api.http.middleware import CLIENT_LEFT
from chorale.api.http.offload import beside
from chorale.api.http.responses import error_response
from chorale.api.http.sse import encode
from chorale.api.http.websocket import GOING_AWAY
from chorale.api.responses.dialects import dialect_of
from chorale.api.responses.request import ResponsesRequest, parse_request
from chorale.api.responses.run import Run, begin
from chorale.api.responses.translate import RenderOptions
from chorale.api.responses.websocket.lanes import Create, Lanes
from chorale.api.state import ServerState, select_model
from chorale.api.telemetry.generation_span import CLIENT_LEFT as DISCONNECTED
from chorale.api.telemetry.request_trace import begin_request, end_request
from chorale.errors import ChoraleError, EngineLoadingError, QueueFullError, RequestError, invalid
from chorale.machine.tasks import end_tasks
from chorale.store.protocol import KEPT, PreviousResponseNotFoundError, StoredItem
from chorale.tracing.context import CURRENT
from chorale.tracing.ignored import header, warnings

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024  # per HTTP process
MAX_SECONDS = 3600.0  # maximum age of a connection
_LANE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")  # the rule of the OpenAI SDK


def routes(state: ServerState) -> list[BaseRoute]:
    return [WebSocketRoute("/v1/responses", partial(serve, state))]


async def serve(
    state: ServerState, scope: Scope, receive: Receive, send: Send, *, max_seconds: float = MAX_SECONDS
) -> None:
    """Serves a connection. Raises ``ChoraleError`` only before it is accepted."""
    session = Session(state, scope, receive, send)
    sockets, owner = state.lifecycle.sockets, state.owner(scope["state"]["owner"])
    if not sockets.admits(owner, 1, MAX_CONNECTIONS):
        raise QueueFullError("too many WebSocket connections are open", retry_after=5.0)
    sockets.take(owner)
    try:
        await send({"type": "websocket.accept"})
        await session.run(scope[GOING_AWAY], max_seconds)
    finally:
        sockets.give(owner)


class Session:
    """Reads the requests of a connection and sends the responses."""

    def __init__(self, state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        self._state, self._receive, self._send = state, receive, send
        self._scope = scope
        head = Request({**scope, "type": "http"})
        self._owner: bytes = head.state.owner
        self._connection_id: str = head.state.request_id
        self._numbers = itertools.count(1)  # response numbers, part of the request ids
        self._dialect = dialect_of(head, state.config)
        self._lanes = Lanes(self._answer, state.config.max_body_bytes)
        # The newest response of each lane, unless it is stored, and its whole conversation.
        self._recent: dict[str | None, tuple[str, tuple[StoredItem, ...]]] = {}
        self._closing: ChoraleError | None = None  # error for further requests, once they are refused

    async def run(self, going_away: asyncio.Event, max_seconds: float) -> None:
        reading = asyncio.create_task(self._read())
        leaving = asyncio.create_task(going_away.wait())
        try:
            done, _ = await asyncio.wait(
                (reading, leaving), timeout=max_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if reading not in done:
                await self._drain(reading, expired=not done)
        finally:
            await end_tasks(reading, leaving)
            await self._lanes.cancel()

    async def _drain(self, reading: asyncio.Task[None], *, expired: bool) -> None:
        """Lets running responses finish; refuses waiting and further requests."""
        code, self._closing = (1000, connection_limit()) if expired else (1001, shutting_down())
        for create in self._lanes.drop_waiting():
            await self._fail(self._closing, create.lane)
        finishing = asyncio.create_task(self._lanes.finish())
        try:
            await asyncio.wait((reading, finishing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            finishing.cancel()
        if reading.done():
            return
        if expired:
            await self._fail(self._closing, None)
        await self._send({"type": "websocket.close", "code": code, "reason": self._closing.message})

    # ------------------------------------------------------------------ in

    async def _read(self) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            lane = None
            try:
                raw = message_text(message)
                data = await parse_bytes(raw, self._state.config, lambda data: data)
                lane = take_lane(data)
                take_type(data)
                if self._closing is not None:
                    raise self._closing
                self._lanes.add(Create(data, lane, len(raw)))
            except ChoraleError as error:
                await self._fail(error, lane)

    # ------------------------------------------------------------------ one response

    async def _answer(self, create: Create) -> None:
        lifecycle, started, status = self._state.lifecycle, time.perf_counter(), 200
        code: str | None = None
        lifecycle.num_requests += 1
        traced = begin_request(self._state, self._scope, f"{self._connection_id}-{next(self._numbers)}")
        try:
            await self._respond(create)
        except ChoraleError as error:
            status, code = error.status, error.code
            self._forget(create.data.get("previous_response_id"))
            await self._fail(error, create.lane)
        except ClientDisconnect:
            status, code = CLIENT_LEFT, DISCONNECTED
        except Exception:
            status, code = 500, "internal_error"
            logger.exception("a response over a WebSocket failed")
            await self._fail(ChoraleError("internal error"), create.lane)
        finally:
            lifecycle.num_requests -= 1
            elapsed = time.perf_counter() - started
            self._state.metrics.http_finished("/v1/responses", "WEBSOCKET", status, elapsed)
            end_request(self._state, traced, "/v1/responses", status, code)

    async def _respond(self, create: Create) -> None:
        read = partial(read_create, create.data)
        fields, generate = await beside(read, heavy=create.num_bytes > THREAD_BYTES)
        state = select_model(self._state, fields.model)
        run = await begin(state, fields, self._owner, self._known(fields.previous_response_id))
        warned = warnings(header(CURRENT.get()))
        try:
            options = RenderOptions(self._dialect, fields.obfuscates)
            async with aclosing(run.stream(options) if generate else run.warm_up(options)) as stream:
                async for frames in stream:
                    for kind, data in frames:
                        # Clients wait for the terminal event, which has the same message.
                        if kind != b"error":
                            await self._send_event(data, create.lane, warned)
                            warned = []
        finally:
            await run.release()
        self._remember(run, create.lane, fields.previous_response_id)

    def _known(self, response_id: str | None) -> tuple[StoredItem, ...] | None:
        """Returns the conversation of an unstored response of this connection, or None."""
        return next((items for known, items in self._recent.values() if known == response_id), None)

    def _remember(self, run: Run, lane: str | None, previous: str | None) -> None:
        ended = run.ended
        if ended is None or ended.body["status"] not in KEPT:
            self._forget(previous)
        elif ended.body["store"]:
            self._recent.pop(lane, None)
        else:
            self._recent[lane] = (run.response_id, (*run.history, *ended.record.output))

    def _forget(self, response_id: Any) -> None:
        """Drops the conversation that a failed request continued, so that its client starts over."""
        for lane in [lane for lane, (known, _) in self._recent.items() if known == response_id]:
            del self._recent[lane]

    # ------------------------------------------------------------------ out

    async def _fail(self, error: ChoraleError, lane: str | None) -> None:
        payload: dict[str, Any] = error.to_dict()
        retry_after = error_response(error).headers.get("retry-after")
        if retry_after is not None:
            payload["headers"] = {"retry-after": retry_after}
        # OpenAI's WebSocket mode has status 400 for an unknown previous response; HTTP has 404.
        status = 400 if error.code == PreviousResponseNotFoundError.default_code else error.status
        await self._send_event(encode({"type": "error", "status": status, "error": payload}), lane)

    async def _send_event(self, data: bytes, lane: str | None, warned: Sequence[str] = ()) -> None:
        if warned:
            data = b'%s,"warnings":%s}' % (data[:-1], encode(warned))
        if lane is not None:
            data = b'%s,"stream_id":%s}' % (data[:-1], encode(lane))
        await self._send({"type": "websocket.send", "text": data.decode()})


def message_text(message: Message) -> bytes:
    if "text" not in message:
        raise RequestError("messages must be JSON objects in text frames", code="invalid_message")
    return bytes(message["text"].encode())


def take_lane(data: dict[str, Any]) -> str | None:
    """Removes and returns ``stream_id``. Raises ``RequestError``."""
    name = data.pop("stream_id", None)
    if name is None or (isinstance(name, str) and _LANE_NAME.fullmatch(name)):
        return name
    raise invalid("stream_id", "must be 1 to 256 letters, digits, underscores, hyphens or periods")


def take_type(data: dict[str, Any]) -> None:
    kind = data.pop("type", None)
    if kind != "response.create":
        raise RequestError(
            f"type: must be 'response.create', not {str(kind)[:64]!r}",
            param="type",
            code="unknown_event_type",
        )


def read_create(data: dict[str, Any]) -> tuple[ResponsesRequest, bool]:
    """Returns the request and whether to generate.

    Raises ``RequestError`` for fields that only HTTP supports.
    """
    for name, only in (("stream", True), ("background", False)):
        if data.pop(name, None) not in (None, only):
            raise RequestError(
                f"'{name}': not available over a WebSocket: responses are always streamed",
                param=name,
                code="unsupported_value",
            )
    generate = data.pop("generate", None)
    if not isinstance(generate, bool | None):
        raise RequestError("generate: must be true or false", param="generate", code="invalid_type")
    fields = parse_request({**data, "stream": True}, needs_input=generate is not False)
    return fields, generate is not False


def connection_limit() -> RequestError:
    return RequestError(
        f"a connection may last at most {MAX_SECONDS / 60:.0f} minutes; open a new one",
        code="websocket_connection_limit_reached",
    )


def shutting_down() -> EngineLoadingError:
    return EngineLoadingError("the server is shutting down", code="server_shutting_down", retry_after=5.0)
