"""/v1/batches: create, retrieve, list and cancel batches. ``chorale.jobs`` runs them."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.batches.request import CreateBatch
from chorale.api.fields import parse
from chorale.api.files.endpoint import needs_files
from chorale.api.http.auth import owner_of
from chorale.api.http.responses import json_response, read_as
from chorale.api.responses.pages import check_names, page_object, read_number
from chorale.api.state import ServerState
from chorale.errors import invalid
from chorale.ids import new_id
from chorale.jobs.service import BatchService
from chorale.store.batch_rows import StoredBatch


@needs_files
async def create(state: ServerState, service: BatchService, request: Request) -> Response:
    fields = await read_as(request, state.config, partial(parse, CreateBatch))
    rows, after = state.store.batches, fields.output_expires_after
    now = rows.now
    batch = StoredBatch(
        id=new_id("batch"),
        owner=owner_of(request),
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
    found = await state.store.batches.get(request.path_params["batch_id"], owner_of(request))
    return json_response(found.to_object())


@needs_files
async def list_batches(state: ServerState, service: BatchService, request: Request) -> Response:
    """Lists batches, newest first."""
    query = request.query_params
    check_names(query, "after", "limit")
    after = query.get("after")
    found = await state.store.batches.page(owner_of(request), after, read_number(query, "limit", 20))
    if found is None:
        raise invalid("after", f"no batch {str(after)[:128]!r}")
    batches, has_more = found
    return json_response(page_object([batch.to_object() for batch in batches], has_more))


@needs_files
async def cancel(state: ServerState, service: BatchService, request: Request) -> Response:
    found = await state.store.batches.cancel(request.path_params["batch_id"], owner_of(request))
    service.wake()
    return json_response(found.to_object())
