"""/v1/batches: create, retrieve, list and cancel batches. ``chorale.jobs`` runs them."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from chorale.api import limits
from chorale.api.fields import Metadata, StrictModel, parse
from chorale.api.files.endpoint import needs_files
from chorale.api.files.request import ExpiresAfter
from chorale.api.http.responses import json_response, read_as
from chorale.api.responses.pages import check_names, page_object, read_number
from chorale.api.state import ServerState
from chorale.errors import invalid
from chorale.ids import new_id
from chorale.jobs.service import BatchService
from chorale.store.batch_rows import StoredBatch
from chorale.store.database.sql import Page

_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_HOURS = {"h": 1, "d": 24}
_MOST_HOURS = 30 * 24


class CreateBatch(StrictModel):
    """``completion_window``: 24h in OpenAI's API; here up to 720h or 30d."""

    input_file_id: Annotated[str, limits.items("identifier")]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, Field(pattern=rf"^{_WINDOW.pattern}$")]
    metadata: Annotated[Metadata, limits.items("metadata")] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def seconds(self) -> float:
        """Returns the completion window in seconds. Raises ``RequestError``."""
        found = _WINDOW.fullmatch(self.completion_window)
        hours = int(found[1]) * _HOURS[found[2]] if found is not None else 0
        if not 1 <= hours <= _MOST_HOURS:
            raise invalid("completion_window", "must be 1h to 720h, or 1d to 30d")
        return hours * 3600.0


@needs_files
async def create(state: ServerState, service: BatchService, request: Request) -> Response:
    fields = await read_as(request, state.config, partial(parse, CreateBatch))
    rows, after = state.store.batches, fields.output_expires_after
    now = rows.now
    batch = StoredBatch(
        id=new_id("batch"),
        owner=request.state.owner,
        status="validating",
        created=now,
        expires=now + fields.seconds,
        input_file_id=fields.input_file_id,
        body={
            "endpoint": fields.endpoint,
            "model": state.model_names[0],
            "completion_window": fields.completion_window,
            "metadata": fields.metadata,
            "output_seconds": None if after is None else after.seconds,
        },
    )
    await rows.create(batch, state.model_names[0], state.config.batch_max_active)
    service.wake()
    return json_response(batch.to_object())


@needs_files
async def retrieve(state: ServerState, service: BatchService, request: Request) -> Response:
    found = await state.store.batches.get(request.path_params["batch_id"], request.state.owner)
    return json_response(found.to_object())


@needs_files
async def list_batches(state: ServerState, service: BatchService, request: Request) -> Response:
    """Lists batches, newest first."""
    query = request.query_params
    check_names(query, "after", "limit")
    page = Page(query.get("after"), read_number(query, "limit", 20), newest_first=True)
    batches, has_more = await state.store.batches.page(request.state.owner, page)
    return json_response(page_object([batch.to_object() for batch in batches], has_more))


@needs_files
async def cancel(state: ServerState, service: BatchService, request: Request) -> Response:
    found = await state.store.batches.cancel(request.path_params["batch_id"], request.state.owner)
    service.wake()
    return json_response(found.to_object())
