"""/v1/files: upload, list, read and delete files.

Before an upload is read, its Content-Length is checked against the limits and reserved in its owner's quota.
Its content is written to the storage as it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from chorale.api.files.form import Form, FormData, boundary_of
from chorale.api.files.request import KNOWN_PURPOSES, PURPOSES, read_form
from chorale.api.http.responses import json_response
from chorale.api.responses.pages import page_object, read_page
from chorale.api.state import Handler, ServerState
from chorale.config.engine import ServerConfig
from chorale.errors import NotFoundError, QueueFullError, invalid
from chorale.jobs.contents import ContentsError
from chorale.jobs.service import BatchService
from chorale.store.database.sqlite import MEMORY
from chorale.store.files import StoredFile, new_file_id
from chorale.store.protocol import StoreError

MAX_UPLOADS = 16  # concurrent uploads per process


def needs_files(handler: Callable[[ServerState, BatchService, Request], Awaitable[Response]]) -> Handler:
    """Returns an endpoint that passes ``state.batches``, or raises ``NotFoundError`` if it is None."""

    async def with_files(state: ServerState, request: Request) -> Response:
        if state.batches is not None:
            return await handler(state, state.batches, request)
        needed = "--response-store with a file or a PostgreSQL database"
        if state.store.path != MEMORY:
            needed = "--batch-storage with a folder or an S3 bucket that all servers share"
        raise NotFoundError(f"this server keeps no files: it needs {needed}", code="files_disabled")

    return with_files


@needs_files
async def create(state: ServerState, service: BatchService, request: Request) -> Response:
    boundary = boundary_of(request.headers.get("content-type", ""))
    owner = state.owner(request.state.owner)
    if not service.uploads.admits(owner, 1, MAX_UPLOADS):
        raise QueueFullError("too many files are being uploaded", retry_after=5)
    length = request.headers.get("content-length", "")
    declared = int(length) if length.isascii() and length.isdigit() else 0
    now = state.store.files.now
    file = StoredFile(new_file_id(), request.state.owner, now, None, "", "", declared)
    room = await state.store.files.begin(file, state.leases.server_id, state.config)
    most = min(room, state.config.batch_max_file_bytes)
    service.uploads.take(owner)
    try:
        form = await Form(request.stream(), boundary, most).read(partial(service.contents.write, file.id))
        done = _described(file, form, state.config)
        if not await state.store.files.finish(done, state.leases.server_id):
            raise StoreError("the upload was interrupted")
    except BaseException:
        await asyncio.shield(_drop(state, service, file.id))
        raise
    finally:
        service.uploads.give(owner)
    return json_response(done.to_object())


async def _drop(state: ServerState, service: BatchService, file_id: str) -> None:
    """Deletes the row and the content of a failed upload."""
    if await state.store.files.drop(file_id):
        with contextlib.suppress(ContentsError):  # ``BatchRunner.sweep`` deletes it later
            await service.contents.delete(file_id)


def _described(file: StoredFile, form: FormData, config: ServerConfig) -> StoredFile:
    fields = read_form(form)
    lifetime = None if fields.expires_after is None else float(fields.expires_after.seconds)
    if lifetime is None and fields.purpose == "batch":
        lifetime = config.batch_ttl
    expires = None if lifetime is None else file.created + lifetime
    return replace(
        file, expires=expires, purpose=fields.purpose, filename=form.filename, num_bytes=form.size or 0
    )


@needs_files
async def list_files(state: ServerState, service: BatchService, request: Request) -> Response:
    """Lists files, newest first unless ``order=asc``."""
    query = request.query_params
    page = read_page(query, "purpose", default_order="desc", limit="files.limit")
    purpose = query.get("purpose")
    if purpose is not None and purpose not in (*PURPOSES, *KNOWN_PURPOSES):
        raise invalid("purpose", f"{purpose[:64]!r} is not a valid purpose of a file")
    files, has_more = await state.store.files.page(request.state.owner, page, purpose)
    return json_response(page_object([file.to_object() for file in files], has_more))


@needs_files
async def retrieve(state: ServerState, service: BatchService, request: Request) -> Response:
    return json_response((await _found(state, request)).to_object())


@needs_files
async def delete(state: ServerState, service: BatchService, request: Request) -> Response:
    file_id = request.path_params["file_id"]
    await state.store.files.delete(file_id, request.state.owner)
    service.wake()  # the runner deletes the content
    return json_response({"id": file_id, "object": "file", "deleted": True})


@needs_files
async def content(state: ServerState, service: BatchService, request: Request) -> Response:
    """Streams the content as fast as the client reads it."""
    file = await _found(state, request)
    pieces = service.contents.read(file.id)
    first = await anext(pieces, b"")  # read before the head is sent: a storage error is a 503
    headers = {
        "content-length": str(file.num_bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{urllib.parse.quote(file.filename, safe='')}",
    }
    return StreamingResponse(_with(first, pieces), headers=headers, media_type="application/octet-stream")


async def _with(first: bytes, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        yield first
        async for piece in pieces:
            yield piece
    finally:
        await pieces.aclose()


async def _found(state: ServerState, request: Request) -> StoredFile:
    return await state.store.files.get(request.path_params["file_id"], request.state.owner)
