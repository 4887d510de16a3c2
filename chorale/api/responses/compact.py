"""POST /v1/responses/compact: replaces a conversation with its user messages and a summary by the model.

The summary is a ``compaction`` item. Sent as input, it replaces everything that it summarizes.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from starlette.requests import Request
from starlette.responses import Response

from chorale.api import limits
from chorale.api.fields import StrictModel, parse
from chorale.api.http.offload import beside
from chorale.api.http.pdfs import read_pdfs
from chorale.api.http.responses import json_response, read_as, until_disconnect
from chorale.api.responses.items.encrypted_content import compaction_object, pack
from chorale.api.responses.items.input import parse_items
from chorale.api.responses.prepare import prepare
from chorale.api.responses.request import HARMLESS, Identifier, ResponsesRequest, as_message
from chorale.api.responses.run import Run
from chorale.api.state import ServerState, select_model
from chorale.errors import EngineError, RequestError
from chorale.ids import new_id
from chorale.store.protocol import Item
from chorale.turns.compaction import REQUEST, most_tokens

_HARMLESS = {name: HARMLESS[name] for name in ("prompt_cache_options", "prompt_cache_retention", "image")} | {
    "prompt_cache_key": "the prefix cache finds equal prefixes by itself"
}


class CompactRequest(StrictModel):
    model: str | None = None
    input: Annotated[list[dict[str, Any]], limits.items("input"), BeforeValidator(as_message)] | None = None
    instructions: str | None = None
    previous_response_id: Identifier | None = None
    service_tier: Literal["auto", "default", "fast", "flex", "priority"] | None = None


async def compact(state: ServerState, request: Request) -> Response:
    """Returns the compacted conversation. Nothing is stored.

    If the conversation exceeds the context window, its oldest items are dropped first.
    """
    fields = await read_as(request, state.config, partial(parse, CompactRequest, harmless=_HARMLESS))
    if fields.model is None:
        raise RequestError("'model' is required", param="model", code="missing_required_parameter")
    state = select_model(state, fields.model)
    if not fields.input and fields.previous_response_id is None:
        raise RequestError("'input' is required", param="input", code="missing_required_parameter")
    owner = request.state.owner
    user_messages = await _user_messages(state, fields, owner)
    room = most_tokens(state.client.info)
    asked = ResponsesRequest(
        model=fields.model,
        input=[*(fields.input or []), {"type": "message", "role": "user", "content": REQUEST}],
        instructions=fields.instructions,
        previous_response_id=fields.previous_response_id,
        store=False,
        truncation="auto",
        max_output_tokens=room,
        thinking_token_budget=room // 2,  # the rest is for the summary
    )
    run = Run(state, asked, await prepare(state, asked, owner), owner)
    try:
        body = await until_disconnect(request, run.complete())
    finally:
        await run.release()
    return json_response(_answer(body, user_messages))


async def _user_messages(state: ServerState, fields: CompactRequest, owner: bytes) -> list[Item]:
    await read_pdfs(state.pdfs, fields.input or [], "input", heavy=True)
    own = await beside(lambda: parse_items(fields.input or []))
    history: list[Item] = []
    if fields.previous_response_id is not None:
        history = [stored.item for stored in await state.store.chain(fields.previous_response_id, owner)]
    return [item for item in (*history, *own) if item.get("role") == "user"]


def _answer(body: dict[str, Any], user_messages: list[Item]) -> dict[str, Any]:
    text = "".join(
        part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]
    )
    if not text:
        raise EngineError("the model wrote no summary")
    summary = compaction_object(new_id("cmp"), pack(text))
    return {
        "id": body["id"],
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*user_messages, summary],
        "usage": body["usage"],
    }
