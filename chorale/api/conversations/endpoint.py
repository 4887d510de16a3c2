"""/v1/conversations: create, read, update and delete conversations and their items.

Items have the types and rules of ``/v1/responses``. The model's output keeps its exact tokens if it is added
by reference or unchanged. While a response uses a conversation, other requests cannot change its items (400
``conversation_locked``, as in OpenAI's API).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from chorale.api import limits
from chorale.api.fields import Include, Metadata, StrictModel, parse
from chorale.api.http.offload import beside, is_heavy
from chorale.api.http.pdfs import read_pdfs
from chorale.api.http.responses import json_response, read_as
from chorale.api.responses.dialects import dialect_of, translate_items
from chorale.api.responses.items.input import parse_items
from chorale.api.responses.items.references import resolve_items
from chorale.api.responses.pages import check_include, check_names, page_object, read_item_page
from chorale.api.state import ServerState
from chorale.store.protocol import StoredItem

_Items = Annotated[list[dict[str, Any]], limits.items("conversation_items")]
_Metadata = Annotated[Metadata, limits.items("metadata")]


class CreateConversation(StrictModel):
    items: _Items = Field(default_factory=list)
    metadata: _Metadata = Field(default_factory=dict)


class UpdateConversation(StrictModel):
    """``metadata`` replaces the previous metadata; null clears it."""

    metadata: _Metadata


class CreateItems(StrictModel):
    items: Annotated[_Items, Field(min_length=1)]
    include: list[Include] = Field(default_factory=list)


def read_update(data: dict[str, Any]) -> UpdateConversation:
    if data.get("metadata", {}) is None:  # a missing field must not clear the metadata
        data = {**data, "metadata": {}}
    return parse(UpdateConversation, data)


async def create(state: ServerState, request: Request) -> Response:
    fields = await read_as(request, state.config, partial(parse, CreateConversation))
    owner = request.state.owner
    items = await _resolved(state, fields.items, owner)
    made = await state.store.conversations.create(owner, fields.metadata, items)
    return json_response(made.to_object())


async def retrieve(state: ServerState, request: Request) -> Response:
    found = await state.store.conversations.get(_id(request), request.state.owner)
    return json_response(found.to_object())


async def update(state: ServerState, request: Request) -> Response:
    fields = await read_as(request, state.config, read_update)
    changed = await state.store.conversations.update(_id(request), request.state.owner, fields.metadata)
    return json_response(changed.to_object())


async def delete(state: ServerState, request: Request) -> Response:
    """Deletes the conversation and its items, but not the responses created in it."""
    await state.store.conversations.delete(_id(request), request.state.owner)
    return json_response({"id": _id(request), "object": "conversation.deleted", "deleted": True})


async def list_items(state: ServerState, request: Request) -> Response:
    page = read_item_page(request.query_params)
    items, has_more = await state.store.conversations.page(_id(request), request.state.owner, page)
    return json_response(page_object(_shown(state, request, items), has_more))


async def add_items(state: ServerState, request: Request) -> Response:
    _check_query(request)
    fields = await read_as(request, state.config, partial(parse, CreateItems))
    owner = request.state.owner
    items = await _resolved(state, fields.items, owner)
    added = await state.store.conversations.append(_id(request), owner, items)
    return json_response(page_object(_shown(state, request, added), has_more=False))


async def retrieve_item(state: ServerState, request: Request) -> Response:
    _check_query(request)
    item_id = request.path_params["item_id"]
    found = await state.store.conversations.item(_id(request), request.state.owner, item_id)
    return json_response(_shown(state, request, [found])[0])


async def delete_item(state: ServerState, request: Request) -> Response:
    """Deletes an item and returns the conversation."""
    item_id = request.path_params["item_id"]
    left = await state.store.conversations.remove(_id(request), request.state.owner, item_id)
    return json_response(left.to_object())


# --------------------------------------------------------------------------- shared


def _id(request: Request) -> str:
    return str(request.path_params["conversation_id"])


def _check_query(request: Request) -> None:
    check_names(request.query_params, "include", "include[]")
    check_include(request.query_params)


async def _resolved(state: ServerState, raw: list[dict[str, Any]], owner: bytes) -> list[StoredItem]:
    """Checks items and assigns ids. Errors refer to them as ``items[i]``."""
    heavy = is_heavy(raw)
    await read_pdfs(state.pdfs, raw, "items", heavy=heavy)
    parsed = await beside(partial(parse_items, raw, "items"), heavy=heavy)
    return await resolve_items(state.store, state.vocab, parsed, owner, "items")


def _shown(state: ServerState, request: Request, items: Sequence[StoredItem]) -> list[dict[str, Any]]:
    """Returns items in the client's dialect."""
    return translate_items([stored.item for stored in items], dialect_of(request, state.config))
