"""Errors in Anthropic's form for all paths below /v1/messages, including errors of the middleware."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from chorale.api.http.responses import error_response, json_response
from chorale.errors import ChoraleError

PATHS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# The SDK's tool runner first requests a thread, and continues without one if it receives this code.
THREAD_UNSUPPORTED = "thread_unsupported_request"
_CODES = (THREAD_UNSUPPORTED,)  # codes that Anthropic's clients look for in the details


def error_body(error: ChoraleError, request_id: str | None = None) -> dict[str, Any]:
    """Returns Anthropic's error body. The type follows from the status; the message names the field."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, default)
    inner: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code in _CODES:
        inner["details"] = {"error_code": error.code, "unsupported": [error.param]}
    body: dict[str, Any] = {"type": "error", "error": inner}
    return body if request_id is None else {**body, "request_id": request_id}


def error_answer(error: ChoraleError, scope: Scope, request_id: str) -> Response:
    """Returns the error response in the form of the requested path's API."""
    response = error_response(error)
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path != PATHS[0] and not path.startswith(f"{PATHS[0]}/"):
        return response
    kept = ("retry-after", "www-authenticate")
    headers = {name: response.headers[name] for name in kept if name in response.headers}
    return json_response(error_body(error, request_id), error.status, {**headers, "request-id": request_id})
