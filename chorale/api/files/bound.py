"""bind: passes the shared ``BatchService`` to the endpoints of files and batches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.state import ServerState
from chorale.errors import NotFoundError
from chorale.jobs.service import BatchService
from chorale.store.database.sqlite import MEMORY

Handler = Callable[[ServerState, BatchService, Request], Awaitable[Response]]


def bind(
    state: ServerState, service: BatchService | None, handler: Handler
) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint. Without a service it raises ``NotFoundError``: the server keeps no files."""
    return partial(_refuse, state) if service is None else partial(handler, state, service)


async def _refuse(state: ServerState, request: Request) -> Response:
    needed = "--response-store with a file or a PostgreSQL database"
    if state.store.path != MEMORY:
        needed = "--batch-storage with a folder or an S3 bucket that all servers share"
    raise NotFoundError(f"this server keeps no files: it needs {needed}", code="files_disabled")
