"""Sends lines to an ASGI app in this process or to a server, with retries while it is busy."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from chorale.ids import new_id
from chorale.jobs.line import Answer, Line, Record
from chorale.requests.openai_client import BUSY, AsyncClient, NoAnswerError, Retries, retry_after
from chorale.tracing.ignored import HEADER

logger = logging.getLogger(__name__)

Scope = dict[str, Any]
Message = dict[str, Any]
App = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

CRASHED = "engine_restarted"  # error code of a crash of the engine
_HEADERS = (b"retry-after", HEADER.encode())


# Sends one request. Returns the response, whatever its status. Raises ``NoAnswerError``. Cancelling the call
# aborts the request.
Sender = Callable[[Line], Awaitable[Answer]]


class AppSender:
    """Calls an ASGI app without a socket.

    ``scope``: keys to add to the scope of each request. Batches of a server pass their owner in it
    (``chorale.api.http.auth.OWNER``), since API keys are never stored.
    """

    def __init__(self, app: App, scope: Mapping[str, Any] = {}) -> None:
        self._app, self._extra = app, dict(scope)

    async def __call__(self, line: Line) -> Answer:
        request_id, bodies = new_id("req"), [line.body]
        start: Message = {}
        pieces: list[bytes] = []
        is_complete = False

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await asyncio.Event().wait()  # the client never disconnects: callers cancel instead
            raise AssertionError("unreachable")

        async def send(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                pieces.append(message.get("body", b""))
                is_complete = not message.get("more_body", False)

        await self._app(self._scope(line, request_id), receive, send)
        if not is_complete:
            raise NoAnswerError("the server ended the request without a complete answer")
        headers = dict(start.get("headers", ()))
        asked, ignored = (headers.get(name, b"").decode("latin-1") for name in _HEADERS)
        return Answer(start["status"], request_id, b"".join(pieces), retry_after(asked), ignored)

    def _scope(self, line: Line, request_id: str) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.url,
            "raw_path": line.url.encode("ascii"),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(line.body)),
                (b"x-request-id", request_id.encode("ascii")),
            ],
            "client": None,
            "server": None,
            "state": {},
            **self._extra,
        }


class UrlSender:
    """Posts lines to a server. ``client`` makes one attempt per call."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def __call__(self, line: Line) -> Answer:
        response = await self._client.post(line.url, line.body)
        return Answer(
            response.status_code,
            response.headers.get("x-request-id") or new_id("req"),
            one_line(response.content),
            retry_after(response.headers.get("retry-after", "")),
            response.headers.get(HEADER, ""),
        )


def one_line(body: bytes) -> bytes:
    """Returns JSON without line ends; a body that is not JSON becomes a JSON string."""
    try:
        has_line_ends = b"\n" in body or b"\r" in body  # some readers split at either
        return msgspec.json.format(body, indent=-1) if has_line_ends else _valid(body)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return msgspec.json.encode(body.decode("utf-8", "replace"))


def _valid(body: bytes) -> bytes:
    msgspec.json.decode(body, type=msgspec.Raw)
    return body


# --------------------------------------------------------------------------- retries


@dataclass(frozen=True, slots=True)
class LineRetries(Retries):
    """``max_errors``: number of failures (status 500 or no answer), of which the last is recorded.
    None: a status 500 is recorded at once, and a server that does not answer counts as busy.

    ``max_crashes``: number of engine crashes after which a line that was in flight each time is given up,
    since it may be the cause. For callers that wait until the engine is ready.
    """

    max_errors: int | None = None
    max_crashes: int | None = None


PATIENT = LineRetries()


class _Attempts:
    """The attempts at one line so far."""

    def __init__(self, retries: LineRetries) -> None:
        self._retries = retries
        self._deadline = time.monotonic() + retries.patience
        self._num = self._num_errors = self._num_crashes = 0

    def failed(self, answer: Answer | None) -> float | None:
        """Counts a failed attempt. Returns the seconds until the next, or None if it was the last."""
        self._num += 1
        self._num_errors += answer is None or answer.status not in BUSY
        asked = None if answer is None else answer.retry_after
        if self._retries.max_crashes is not None and answer is not None and _is_crash(answer):
            self._num_crashes += 1
            asked = None
        limits = self._retries
        if self._num_errors == limits.max_errors or self._num_crashes == limits.max_crashes:
            return None
        delay = limits.delay(self._num - 1, asked)
        is_last = self._num == limits.attempts or time.monotonic() + delay > self._deadline
        return None if is_last else delay


async def execute(
    line: Line,
    send: Sender,
    retries: LineRetries = PATIENT,
    ready: Callable[[], Awaitable[None]] | None = None,
) -> Record:
    """Sends a line, with retries. Returns its record. Raises only ``CancelledError``.

    ``ready`` returns once the engine can take requests.
    """
    attempts = _Attempts(retries)
    while True:
        if ready is not None:
            await ready()
        answer: Answer | None = None
        try:
            answer = await send(line)
        except NoAnswerError as error:
            record = Record(line.custom_id, fault=error.with_traceback(None))  # frames are large
        except Exception as error:
            logger.exception("line %r failed", line.custom_id[:200])
            fault = NoAnswerError(f"internal error ({type(error).__name__})")
            return Record(line.custom_id, fault=fault)
        else:
            record = Record(line.custom_id, answer)
            final = 500 if retries.max_errors is not None else 600
            if answer.status < final and answer.status not in BUSY:
                return record
        delay = attempts.failed(answer)
        if delay is None:
            return record
        await asyncio.sleep(delay)


class _Error(msgspec.Struct):
    code: str | None = None


class _Body(msgspec.Struct):
    error: _Error | None = None


def _is_crash(answer: Answer) -> bool:
    try:
        error = msgspec.json.decode(answer.body, type=_Body).error
    except (ValueError, msgspec.MsgspecError):
        return False
    return answer.status in BUSY and error is not None and error.code == CRASHED
