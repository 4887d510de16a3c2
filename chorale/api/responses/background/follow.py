"""follow: the event stream of a background response, rendered from its stored events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

from chorale.api.http.sse import Frame
from chorale.api.responses.event_log import read_chunk
from chorale.api.responses.items.objects import ResponseBuilder
from chorale.api.responses.translate import RenderOptions, Translator
from chorale.api.state import ServerState
from chorale.errors import EngineError, NotFoundError, RequestError
from chorale.store.protocol import StoredResponse, StoreError

POLL_SECONDS = 0.2  # interval of store reads while another process runs the response
_OWN_POLL_SECONDS = 5.0  # a fallback: a job of this process notifies its readers


async def follow(
    state: ServerState, response_id: str, owner: bytes, options: RenderOptions
) -> AsyncGenerator[list[Frame]]:
    """Yields the frames of all events after ``options.start_after``. Some lists are empty.

    Before the first list, raises ``NotFoundError``, or ``RequestError`` if it is not a background response.
    If the response is deleted while the stream is open, the stream ends with an ``error`` event.
    """
    stored = await state.store.get(response_id, owner)
    if stored is None:
        raise not_found(response_id)
    if not stored.body.get("background"):
        raise RequestError(
            "'stream': only background responses keep their events and can be resumed",
            param="stream",
            code="unsupported_value",
        )
    translator = Translator(ResponseBuilder.of_stored(stored, state.vocab), options)
    rows, num_read = state.store.background, 0
    started = begun = False
    while True:
        job = state.background.find(response_id)
        written = job.written() if job is not None else None
        log = await rows.events(response_id, owner, num_read)
        if log is None:
            if not begun:
                raise not_found(response_id)
            yield translator.error(_deleted())
            return
        if not started:
            started = True
            if frames := translator.start():
                begun = True
                yield frames
        if log.repeatable and log.chunks:
            # A resumed response would contradict the events sent here, so forbid resuming it.
            with contextlib.suppress(StoreError):
                await rows.settle(response_id, owner)
                continue
            log, written = replace(log, chunks=()), None
        if log.chunks:
            num_read = log.chunks[-1].first + log.chunks[-1].num_events
            if frames := translator.feed(event for chunk in log.chunks for event in read_chunk(chunk.data)):
                begun = True
                yield frames
        elif not log.live:
            if frames := await _terminal(state, stored, translator):
                yield frames
            return
        elif state.background.closing and state.background.find(response_id) is None:
            yield translator.error(_stopping(translator))
            return
        else:
            if not begun:
                begun = True
                yield []  # sends the HTTP headers
            await _wait(written)


async def _terminal(state: ServerState, stored: StoredResponse, translator: Translator) -> list[Frame]:
    ended = await state.store.get(stored.id, stored.owner)
    return translator.error(_deleted()) if ended is None else translator.finish(ended.to_object())


def not_found(response_id: str) -> NotFoundError:
    return NotFoundError(f"no response with id {response_id[:128]!r}", param="response_id")


def _deleted() -> NotFoundError:
    """Returns the last event's error. Without this event, clients would try to resume the stream."""
    return NotFoundError("the response was deleted before it ended", code="response_deleted")


def _stopping(translator: Translator) -> EngineError:
    """Returns the error sent before this server stops. Another server may continue the response."""
    last = translator.next_number - 1
    message = f"this server is stopping; resume the stream with starting_after={last}"
    return EngineError(message, code="server_restarted")


async def _wait(written: asyncio.Event | None) -> None:
    if written is None:
        await asyncio.sleep(POLL_SECONDS)
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_OWN_POLL_SECONDS):
            await written.wait()
