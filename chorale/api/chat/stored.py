"""Stored chat completions (``store: true``): read, list, update metadata, delete."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api import limits
from chorale.api.chat.request import ChatRequest
from chorale.api.fields import Metadata, StrictModel
from chorale.api.http.responses import json_response, parse_model, read_as
from chorale.api.responses.pages import cut, page_object, read_page
from chorale.api.state import ServerState
from chorale.errors import ChoraleError
from chorale.store.protocol import StoredCompletion

logger = logging.getLogger(__name__)

# Fields of the request that are returned with a stored completion.
_ECHOED = (
    "tools",
    "tool_choice",
    "response_format",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


class MetadataUpdate(StrictModel):
    metadata: Annotated[Metadata, limits.items("metadata")]


async def keep(state: ServerState, chat: ChatRequest, body: Mapping[str, Any], owner: bytes) -> None:
    """Stores a completion before its response ends. Counts and logs a failure of the store."""
    echoed = {name: getattr(chat, name) for name in _ECHOED}
    # Routed experts may be megabytes.
    choices = [{k: v for k, v in each.items() if k != "routed_experts"} for each in body["choices"]]
    completion = {**body, **echoed, "choices": choices, "metadata": chat.metadata or {}}
    try:
        await state.store.completions.put(StoredCompletion(completion, chat.messages), owner)
    except ChoraleError as error:
        state.metrics.series.count("chorale:response_store_failures")
        logger.warning("completion %s could not be stored: %s", body["id"], error)


async def retrieve(state: ServerState, request: Request) -> Response:
    return json_response((await _found(state, request)).completion)


async def update(state: ServerState, request: Request) -> Response:
    """Replaces the metadata of a stored completion."""
    asked = await read_as(request, state.config, partial(parse_model, MetadataUpdate))
    completion_id = request.path_params["completion_id"]
    changed = await state.store.completions.update(completion_id, request.state.owner, asked.metadata)
    return json_response(changed.completion)


async def delete(state: ServerState, request: Request) -> Response:
    completion_id = request.path_params["completion_id"]
    await state.store.completions.delete(completion_id, request.state.owner)
    return json_response({"id": completion_id, "object": "chat.completion.deleted", "deleted": True})


async def list_completions(state: ServerState, request: Request) -> Response:
    """Lists completions, oldest first unless ``order=desc``, filtered by ``model`` and
    ``metadata[KEY]=VALUE``.
    """
    query = request.query_params
    labels = {name[9:-1]: query[name] for name in query if name.startswith("metadata[") and name[-1] == "]"}
    page = read_page(query, "model", *(f"metadata[{key}]" for key in labels))
    found = await state.store.completions.page(request.state.owner, page, labels, query.get("model"))
    return json_response(page_object(*found))


async def list_messages(state: ServerState, request: Request) -> Response:
    """Lists the request messages of a stored completion."""
    stored = await _found(state, request)
    asked = read_page(request.query_params)
    messages = [_message(stored.id, number, given) for number, given in enumerate(stored.messages)]
    return json_response(cut(messages, asked))


def _message(completion_id: str, number: int, given: Mapping[str, Any]) -> dict[str, Any]:
    content = given.get("content")
    parts = content if isinstance(content, list) else None
    shown = {**given, "id": f"{completion_id}-{number}", "content_parts": parts}
    return shown | {"content": None if parts is not None else content}


async def _found(state: ServerState, request: Request) -> StoredCompletion:
    return await state.store.completions.get(request.path_params["completion_id"], request.state.owner)
