"""HTTP helpers of the endpoints: reading a JSON body, and responding with JSON, an error, or a stream of
events.

Endpoints import from here; ``body`` and ``stream`` contain the implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from chorale.api.http.body import parse_model, read_as, read_json
from chorale.api.http.offload import beside
from chorale.api.http.sse import encode
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


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Encodes dicts, lists, dataclasses and msgspec structs as JSON, and non-finite floats as null."""
    return Response(encode(data), status, headers, media_type="application/json")


async def large_response(
    make: Callable[[], Any], *, heavy: bool, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns ``json_response(make())``, computed in a thread if it is heavy."""
    return await beside(lambda: json_response(make(), headers=headers), heavy=heavy)


def error_response(error: ChoraleError) -> Response:
    """Returns ``{"error": {...}}`` with the error's status, and Retry-After in whole seconds if known."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response({"error": error.to_dict()}, error.status, headers)
