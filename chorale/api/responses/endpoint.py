"""/v1/responses: create a response (blocking, streaming or in the background), and count input tokens;
read, stream, cancel or delete one by its id, or list its input.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.http.offload import is_heavy
from chorale.api.http.responses import EventStream, json_response, large_response, read_as, until_disconnect
from chorale.api.http.sse import DONE, Frame, framed
from chorale.api.responses.background.follow import follow, not_found
from chorale.api.responses.background.job import Job
from chorale.api.responses.dialects import dialect_of, translate_body, translate_items
from chorale.api.responses.pages import (
    check_include,
    check_names,
    cut,
    read_flag,
    read_item_page,
    read_number,
)
from chorale.api.responses.prepare import build_prompt
from chorale.api.responses.request import ResponsesRequest, packed_request, parse_request
from chorale.api.responses.run import Run, begin
from chorale.api.responses.translate import RenderOptions
from chorale.api.state import ServerState, check_model, select_model
from chorale.errors import RequestError
from chorale.store.protocol import StoredResponse

_CANCEL_SECONDS = 5.0  # longest wait for the job to store its end; after that, the store ends the response
_STREAM_ONLY = ("starting_after", "include_obfuscation")


async def create(state: ServerState, request: Request) -> Response:
    dialect = dialect_of(request, state.config)
    fields, kept = await read_as(request, state.config, _parse_kept)
    state = select_model(state, fields.model)
    run = await begin(state, fields, request.state.owner)
    options = RenderOptions(dialect, fields.obfuscates)
    if fields.background:
        await _launch(state, run, kept)
        if not fields.stream:
            return json_response(run.base)  # it has no output yet
        return event_stream(follow(state, run.response_id, run.owner, options), options)
    if fields.stream:
        return event_stream(run.stream(options), options, run.release)
    try:
        body = await until_disconnect(request, run.complete())
        return await large_response(lambda: translate_body(body, dialect), heavy=is_heavy(body))
    finally:
        await run.release()


async def count_tokens(state: ServerState, request: Request) -> Response:
    """Returns the number of prompt tokens for a body of ``create``."""
    fields = await read_as(request, state.config, parse_request)
    check_model(state, fields.model)
    prompt = await build_prompt(state, fields, request.state.owner)
    await prompt.close()
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


def _parse_kept(data: dict[str, Any]) -> tuple[ResponsesRequest, bytes | None]:
    """Returns the request and, for a background response, the body for another server to resume it."""
    fields = parse_request(data)
    return fields, packed_request(data) if fields.background else None


async def _launch(state: ServerState, run: Run, request: bytes | None) -> None:
    job = Job(run, request=request)
    try:
        await state.background.launch(job, state.background_room)
    except BaseException:
        await run.release()
        raise


# --------------------------------------------------------------------------- by id


async def retrieve(state: ServerState, request: Request) -> Response:
    """Returns the response, or with ``stream=true`` its events after ``starting_after``."""
    query = request.query_params
    check_names(query, "stream", "include", "include[]", *_STREAM_ONLY)
    check_include(query)
    dialect = dialect_of(request, state.config)
    after, obfuscate = read_number(query, "starting_after", -1), read_flag(query, "include_obfuscation")
    if not read_flag(query, "stream"):
        if after >= 0:
            raise RequestError("'starting_after' needs 'stream=true'", param="starting_after")
        body = (await _stored(state, request)).to_object()
        return await large_response(lambda: translate_body(body, dialect), heavy=is_heavy(body))
    options = RenderOptions(dialect, obfuscate, after)
    return event_stream(follow(state, _id(request), request.state.owner, options), options)


async def cancel(state: ServerState, request: Request) -> Response:
    """Cancels a background response. One that has ended is returned unchanged."""
    stored = await _stored(state, request)
    if not stored.body.get("background"):
        raise RequestError("only responses with 'background' can be cancelled", param="response_id")
    job = state.background.find(stored.id)
    if job is not None:
        job.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                await job.ended()
    ended = await state.store.background.end(stored.id, stored.owner, "cancelled")
    if ended is None:
        raise not_found(stored.id)
    return json_response(translate_body(ended.to_object(), dialect_of(request, state.config)))


async def delete(state: ServerState, request: Request) -> Response:
    """Deletes a response, and stops it if it is running."""
    response_id = _id(request)
    if not await state.store.delete(response_id, request.state.owner):
        raise not_found(response_id)
    job = state.background.find(response_id)
    if job is not None:
        job.stop()
    return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


async def input_items(state: ServerState, request: Request) -> Response:
    """Returns a page of the response's input without its history, newest first unless ``order=asc``."""
    page = read_item_page(request.query_params)
    stored = await _stored(state, request)
    items = translate_items([entry.item for entry in stored.input], dialect_of(request, state.config))
    return json_response(cut(items, page))


def event_stream(
    source: AsyncGenerator[list[Frame]],
    options: RenderOptions,
    on_end: Callable[[], Awaitable[None]] | None = None,
) -> EventStream:
    """Returns the SSE body. Open Responses ends a stream with ``[DONE]``, OpenAI does not."""
    last = DONE if options.dialect == "open-responses" else b""
    return EventStream(framed(source, last), on_end=on_end)


def _id(request: Request) -> str:
    return str(request.path_params["response_id"])


async def _stored(state: ServerState, request: Request) -> StoredResponse:
    response_id = _id(request)
    stored = await state.store.get(response_id, request.state.owner)
    if stored is None:
        raise not_found(response_id)
    return stored
