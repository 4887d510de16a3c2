"""What every endpoint needs of HTTP: read a JSON body, answer with JSON, an error, or a stream of events.

Endpoints import from here; ``body`` and ``stream`` hold the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from chorale.api.http.body import parse_model, read_as, read_json
from chorale.api.http.offload import beside
from chorale.api.http.stream import EventStream, until_disconnect
from chorale.errors import ChoraleError

__all__ = [
    "EventStream",
    "error_response",
    "json_response",
    "large_response",
    "parse_model",
    "read_as",
    "read_json",
    "until_disconnect",
]

_encode = msgspec.json.Encoder().encode


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Dicts, lists, dataclasses and msgspec structs; a float that is not finite becomes null."""
    return Response(_encode(data), status, headers, media_type="application/json")


async def large_response(
    make: Callable[[], Any], *, heavy: bool, headers: Mapping[str, str] | None = None
) -> Response:
    """``json_response(make())``; made and encoded in a thread if it is heavy."""
    return await beside(lambda: json_response(make(), headers=headers), heavy=heavy)


def error_response(error: ChoraleError) -> Response:
    """``{"error": {...}}`` with the error's own status; Retry-After in whole seconds when it knows one."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response({"error": error.to_dict()}, error.status, headers)
