"""follow: the event stream of a background response, rendered from the store, live until its end."""

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

POLL_SECONDS = 0.2  # how often the store is asked about a response that another process works on
_OWN_POLL_SECONDS = 5.0  # a job of this process notifies its readers; this is a safety net


async def follow(
    state: ServerState, response_id: str, owner: bytes, options: RenderOptions
) -> AsyncGenerator[list[Frame]]:
    """The frames of every event from ``options.start_after`` to the terminal one. Some lists are empty.

    Raises ``NotFoundError``, or ``RequestError`` for a response whose events are not kept, before the
    first list. A response that is deleted meanwhile ends its streams with an ``error`` event.
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
        page = await rows.events(response_id, owner, num_read)
        if page is None:
            if not begun:
                raise not_found(response_id)
            yield translator.error(_deleted())
            return
        if not started:
            started = True
            if frames := translator.start():
                begun = True
                yield frames
        if page.repeatable and page.chunks:
            # What a reader has seen must stay true: the response is not resumed from here on.
            with contextlib.suppress(StoreError):
                await rows.settle(response_id, owner)
                continue
            page, written = replace(page, chunks=()), None
        if page.chunks:
            num_read = page.chunks[-1].first + page.chunks[-1].num_events
            if frames := translator.feed(event for chunk in page.chunks for event in read_chunk(chunk.data)):
                begun = True
                yield frames
        elif not page.live:
            if frames := await _terminal(state, stored, translator):
                yield frames
            return
        elif state.background.closing and state.background.find(response_id) is None:
            yield translator.error(_stopping(translator))
            return
        else:
            if not begun:
                begun = True
                yield []  # so that the client has its headers
            await _wait(written)


async def _terminal(state: ServerState, stored: StoredResponse, translator: Translator) -> list[Frame]:
    ended = await state.store.get(stored.id, stored.owner)
    return translator.error(_deleted()) if ended is None else translator.finish(ended.to_object())


def not_found(response_id: str) -> NotFoundError:
    return NotFoundError(f"no response with id {response_id[:128]!r}", param="response_id")


def _deleted() -> NotFoundError:
    """A stream that just stops looks like a broken connection, which clients resume."""
    return NotFoundError("the response was deleted before it ended", code="response_deleted")


def _stopping(translator: Translator) -> EngineError:
    """The response waits for a server; this one is about to close the connection."""
    last = translator.next_number - 1
    message = f"this server stops; resume the stream with starting_after={last}"
    return EngineError(message, code="server_restarted")


async def _wait(written: asyncio.Event | None) -> None:
    if written is None:
        await asyncio.sleep(POLL_SECONDS)
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_OWN_POLL_SECONDS):
            await written.wait()
