"""/v1/responses: create, read, delete, list input items, count input tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api import limits
from chorale.api.http import EventStream, json_response, read_json, until_disconnect
from chorale.api.models import check_model
from chorale.api.responses.prepare import build_prompt, prepare
from chorale.api.responses.request import ResponsesRequest, parse_request, unsupported
from chorale.api.responses.run import Run
from chorale.api.responses.stored import StoredResponse
from chorale.api.state import ServerState
from chorale.errors import NotFoundError, RequestError


def routes(state: ServerState) -> list[Route]:
    return [
        Route("/v1/responses", partial(create, state), methods=["POST"]),
        Route("/v1/responses/input_tokens", partial(count_tokens, state), methods=["POST"]),
        Route("/v1/responses/{response_id}", partial(retrieve, state), methods=["GET"]),
        Route("/v1/responses/{response_id}", partial(delete, state), methods=["DELETE"]),
        Route("/v1/responses/{response_id}/input_items", partial(input_items, state), methods=["GET"]),
    ]


async def create(state: ServerState, request: Request) -> Response:
    fields = await _read(state, request)
    owner = owner_of(request)
    prepared = await prepare(state, fields, owner)
    run = Run(state, fields, prepared, owner)
    if fields.stream:
        return EventStream(run.stream())
    return json_response(await until_disconnect(request, run.complete()))


async def count_tokens(state: ServerState, request: Request) -> Response:
    """The length of the prompt that the same body would make."""
    prompt = await build_prompt(state, await _read(state, request), owner_of(request))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


async def retrieve(state: ServerState, request: Request) -> Response:
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise unsupported("'stream': only background responses can be resumed; none exist yet", "stream")
    return json_response((await _stored(state, request)).to_object())


async def delete(state: ServerState, request: Request) -> Response:
    response_id = request.path_params["response_id"]
    if not await state.store.delete(response_id, owner_of(request)):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


async def input_items(state: ServerState, request: Request) -> Response:
    """The response's own input, newest first unless ``order=asc``; pages by ``after`` and ``limit``."""
    stored = await _stored(state, request)
    items = [entry.item for entry in stored.input]
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order: must be 'asc' or 'desc'", param="order")
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        position = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if position is None:
            raise RequestError(f"after: {after[:128]!r} is not an input item of this response", param="after")
        items = items[position + 1 :]
    return json_response(_page(items, _limit(query)))


# --------------------------------------------------------------------------- shared


def owner_of(request: Request) -> bytes:
    """Whose responses these are: the digest of the caller's key, left by the guard of the route."""
    owner = request.state.owner
    assert isinstance(owner, bytes)
    return owner


async def _read(state: ServerState, request: Request) -> ResponsesRequest:
    fields = parse_request(await read_json(request, state.config))
    if fields.model is not None:
        check_model(state, fields.model)
    return fields


async def _stored(state: ServerState, request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    stored = await state.store.get(response_id, owner_of(request))
    if stored is None:
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> NotFoundError:
    return NotFoundError(f"no response with id {response_id[:128]!r}", param="response_id")


def _limit(query: QueryParams) -> int:
    text = query.get("limit", "20")
    value: Any = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text
    return int(
        limits.checked("limit", value, lambda message: RequestError(f"limit: {message}", param="limit"))
    )


def _page(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
