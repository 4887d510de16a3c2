"""follow: the event stream of a background response, from any event on, live until its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from chorale.api.responses.replay import frame
from chorale.api.state import ServerState
from chorale.errors import NotFoundError, RequestError
from chorale.store.protocol import EventChunk, StoreError

POLL_SECONDS = 0.2  # how often the store is asked about a response that another process works on
_TERMINALS = tuple(f"event: response.{status}\n".encode() for status in ("completed", "incomplete", "failed"))
_OWN_POLL_SECONDS = 5.0  # ours tells us; this is only against being told nothing


async def follow(state: ServerState, response_id: str, owner: bytes, after: int) -> AsyncGenerator[bytes]:
    """SSE bytes of every event after number ``after`` (-1: all), to the terminal one.

    Raises ``NotFoundError``, or ``RequestError`` for a response whose events are not kept, before the
    first piece. A response that is deleted meanwhile ends its streams with an ``error`` event.
    """
    begun = ended = False
    while True:
        job = state.background.find(response_id)
        written = job.written() if job is not None else None
        page = await state.store.live.events(response_id, owner, after)
        if page is None:
            if begun:
                if not ended:
                    yield _deleted(after + 1)
                return
            raise NotFoundError(f"no response with id {response_id[:128]!r}", param="response_id")
        if not page.num_events:
            raise RequestError(
                "'stream': only background responses keep their events and can be resumed",
                param="stream",
                code="unsupported_value",
            )
        if page.repeatable and any(chunk.first > 0 for chunk in page.chunks):
            # What a reader has seen must stay true: the response is not begun again from here on.
            with contextlib.suppress(StoreError):
                await state.store.live.settle(response_id, owner)
                continue
            if not begun:
                begun = True
                yield b": waiting\n\n"
            await asyncio.sleep(POLL_SECONDS)
            continue
        for chunk in page.chunks:
            begun = True
            ended = any(terminal in chunk.data for terminal in _TERMINALS)
            yield _later_than(chunk, after)
            after = chunk.first + chunk.num_events - 1
        if page.chunks:
            continue
        if not page.live:
            return
        if state.background.closing and state.background.find(response_id) is None:
            yield _stopping(after + 1)
            return
        if not begun:
            begun = True
            yield b": waiting\n\n"  # so that the client has its headers
        await _wait(written)


def _deleted(number: int) -> bytes:
    """A stream that just stops looks like a broken connection, which clients resume."""
    message = "the response was deleted before it ended"
    return frame("error", number, code="response_deleted", message=message, param=None)


def _stopping(number: int) -> bytes:
    """The response waits for a server; this one is about to close the connection."""
    message = f"this server stops; resume the stream with starting_after={number - 1}"
    return frame("error", number, code="server_restarted", message=message, param=None)


def _later_than(chunk: EventChunk, after: int) -> bytes:
    """The chunk's events after number ``after``. Events are frames that end with an empty line."""
    num_known = after + 1 - chunk.first
    if num_known <= 0:
        return chunk.data
    return chunk.data.split(b"\n\n", num_known)[num_known]


async def _wait(written: asyncio.Event | None) -> None:
    if written is None:
        await asyncio.sleep(POLL_SECONDS)
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_OWN_POLL_SECONDS):
            await written.wait()
