"""/v1/responses: create a response (blocking, streaming or in the background), and count input tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from chorale.api.http.auth import owner_of
from chorale.api.http.offload import is_heavy
from chorale.api.http.responses import EventStream, json_response, large_response, read_as, until_disconnect
from chorale.api.responses import by_id
from chorale.api.responses.background.follow import follow
from chorale.api.responses.background.job import Job
from chorale.api.responses.by_id import event_stream
from chorale.api.responses.compact import compact
from chorale.api.responses.dialects import dialect_of, translate_body
from chorale.api.responses.prepare import build_prompt
from chorale.api.responses.request import ResponsesRequest, packed_request, parse_request
from chorale.api.responses.run import Run, begin
from chorale.api.responses.translate import RenderOptions
from chorale.api.state import ServerState, check_model, select_model


def routes(state: ServerState) -> list[Route]:
    one = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", partial(create, state), methods=["POST"]),
        Route("/v1/responses/input_tokens", partial(count_tokens, state), methods=["POST"]),
        Route("/v1/responses/compact", partial(compact, state), methods=["POST"]),
        Route(one, partial(by_id.retrieve, state), methods=["GET"]),
        Route(one, partial(by_id.delete, state), methods=["DELETE"]),
        Route(f"{one}/cancel", partial(by_id.cancel, state), methods=["POST"]),
        Route(f"{one}/input_items", partial(by_id.input_items, state), methods=["GET"]),
    ]


async def create(state: ServerState, request: Request) -> Response:
    dialect = dialect_of(request, state.config)
    fields, kept = await read_as(request, state.config, _parse_kept)
    state = select_model(state, fields.model)
    run = await begin(state, fields, owner_of(request))
    options = RenderOptions(dialect, fields.obfuscates)
    if fields.background:
        await _launch(state, run, kept)
        if not fields.stream:
            return json_response(run.base)  # it has no output yet
        return event_stream(follow(state, run.response_id, run.owner, options), options)
    if fields.stream:
        return _Stream(event_stream(run.stream(options), options), run)
    try:
        body = await until_disconnect(request, run.complete())
        return await large_response(lambda: translate_body(body, dialect), heavy=is_heavy(body))
    finally:
        await run.release()


async def count_tokens(state: ServerState, request: Request) -> Response:
    """Returns the number of prompt tokens for a body of ``create``."""
    prompt = await build_prompt(state, await _read(state, request), owner_of(request))
    await prompt.close()
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


class _Stream(Response):
    """A stream that releases its run at the end, even if it was never started."""

    def __init__(self, stream: EventStream, run: Run) -> None:
        self._stream, self._run = stream, run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._stream(scope, receive, send)
        finally:
            await self._run.release()


async def _read(state: ServerState, request: Request) -> ResponsesRequest:
    fields = await read_as(request, state.config, parse_request)
    check_model(state, fields.model)
    return fields


def _parse_kept(data: dict[str, Any]) -> tuple[ResponsesRequest, bytes | None]:
    """Returns the request and, for a background response, the body for another server to resume it."""
    fields = parse_request(data)
    return fields, packed_request(data) if fields.background else None


async def _launch(state: ServerState, run: Run, request: bytes | None) -> None:
    job = Job(run, state.store, state.leases.server_id, request=request)
    try:
        await state.background.launch(job, state.background_room)
    except BaseException:
        await run.release()
        raise
