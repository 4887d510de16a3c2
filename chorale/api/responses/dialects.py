"""Dialects: variants of the response format, for clients that do not support all of OpenAI's.

``open-responses``: event names and error events as specified by openresponses.org. ``summary``: reasoning
is returned as a summary, because some clients show only summaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from starlette.requests import Request

from chorale.config.engine import ServerConfig
from chorale.errors import RequestError

Dialect = Literal["openai", "open-responses", "summary"]
Event = tuple[str, dict[str, Any]]  # (type, fields)
HEADER = "x-responses-dialect"

_OPEN_NAMES = {f"response.reasoning_text.{end}": f"response.reasoning.{end}" for end in ("delta", "done")}
_REQUEST_CODES = ("unsatisfiable_constraints", "context_length_exceeded", "invalid_value", "response_deleted")
_SUMMARY_NAMES = {
    "response.reasoning_text.delta": "response.reasoning_summary_text.delta",
    "response.reasoning_text.done": "response.reasoning_summary_text.done",
    "response.content_part.added": "response.reasoning_summary_part.added",
    "response.content_part.done": "response.reasoning_summary_part.done",
}


def dialect_of(request: Request, config: ServerConfig) -> Dialect:
    """Returns the header's dialect, or the server's default. Raises ``RequestError`` if it is unknown."""
    asked = request.headers.get(HEADER)
    if asked is None:
        return config.responses_dialect
    for dialect in get_args(Dialect):
        if asked == dialect:
            return dialect  # type: ignore[no-any-return]
    raise RequestError(f"{HEADER}: must be one of {', '.join(get_args(Dialect))}", param=HEADER)


def with_summary(dialect: Dialect, reasoning: Mapping[str, Any]) -> Dialect:
    """Returns ``summary`` if the request asked for summaries: OpenAI returns them only then.

    ``reasoning``: that object of the response. Dialects other than ``openai`` are returned unchanged.
    """
    return "summary" if dialect == "openai" and reasoning.get("summary") else dialect


def translate_body(body: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Returns a response object in ``dialect``."""
    if with_summary(dialect, body["reasoning"]) != "summary":
        return body
    return {**body, "output": translate_items(body["output"], "summary")}


def translate_items(items: Sequence[dict[str, Any]], dialect: Dialect) -> list[dict[str, Any]]:
    return [_as_summary(item) for item in items] if dialect == "summary" else list(items)


def translate_event(kind: str, fields: dict[str, Any], dialect: Dialect) -> Event:
    """Returns a stream event in ``dialect``, without its sequence number."""
    if dialect == "open-responses":
        return _OPEN_NAMES.get(kind, kind), _nested(fields) if kind == "error" else fields
    return _event_as_summary(kind, fields) if dialect == "summary" else (kind, fields)


def _nested(error: dict[str, Any]) -> dict[str, Any]:
    """Returns the error event's fields, nested in an ``error`` object."""
    kind = "invalid_request_error" if error["code"] in _REQUEST_CODES else "server_error"
    return {"error": {"type": kind, **error}}


def _event_as_summary(kind: str, fields: dict[str, Any]) -> Event:
    if "response" in fields:
        return kind, {**fields, "response": translate_body(fields["response"], "summary")}
    if "item" in fields:
        return kind, {**fields, "item": _as_summary(fields["item"])}
    part = fields.get("part")
    if not (kind.startswith("response.reasoning_text.") or (part and part["type"] == "reasoning_text")):
        return kind, fields
    renamed = {"summary_index" if key == "content_index" else key: value for key, value in fields.items()}
    if part:
        renamed["part"] = {**part, "type": "summary_text"}
    return _SUMMARY_NAMES[kind], renamed


def _as_summary(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "reasoning":
        return item
    summary = [{**part, "type": "summary_text"} for part in item["content"]]
    return {**item, "summary": [*item["summary"], *summary], "content": []}
