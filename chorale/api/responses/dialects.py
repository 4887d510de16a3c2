"""Dialects: other forms of an answer, for clients that do not know all of OpenAI's.

``open-responses``: the event names of openresponses.org, and its form of the error event. ``summary``:
reasoning as the summary, which is all that some clients show. Events are made and stored once, in OpenAI's
form; these functions translate whole SSE frames, and response objects, on their way to one client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
from starlette.requests import Request

from chorale.config import ServerConfig
from chorale.errors import RequestError

Dialect = Literal["openai", "open-responses", "summary"]
HEADER = "x-responses-dialect"

_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode
# A frame's first line and the start of its second. No text can hold them: JSON has no line breaks.
_OPEN_NAMES = tuple(
    (
        f'event: response.reasoning_text.{end}\ndata: {{"type":"response.reasoning_text.{end}"'.encode(),
        f'event: response.reasoning.{end}\ndata: {{"type":"response.reasoning.{end}"'.encode(),
    )
    for end in ("delta", "done")
)
_ERROR = b"event: error\ndata: "
_REQUEST_CODES = ("unsatisfiable_constraints", "context_length_exceeded", "invalid_value", "response_deleted")
_SUMMARY_NAMES = {
    "response.reasoning_text.delta": "response.reasoning_summary_text.delta",
    "response.reasoning_text.done": "response.reasoning_summary_text.done",
    "response.content_part.added": "response.reasoning_summary_part.added",
    "response.content_part.done": "response.reasoning_summary_part.done",
}


def dialect_of(request: Request, config: ServerConfig) -> Dialect:
    """The header's, else the server's. Raises ``RequestError`` for one that is unknown."""
    asked = request.headers.get(HEADER)
    if asked is None:
        return config.responses_dialect
    for dialect in get_args(Dialect):
        if asked == dialect:
            return dialect  # type: ignore[no-any-return]
    raise RequestError(f"{HEADER}: must be one of {', '.join(get_args(Dialect))}", param=HEADER)


def with_summary(dialect: Dialect, reasoning: Mapping[str, Any]) -> Dialect:
    """``summary`` for a response whose request asked for summaries: OpenAI gives them to no other.

    ``reasoning``: of the request or the response. A dialect that was asked for stays.
    """
    return "summary" if dialect == "openai" and reasoning.get("summary") else dialect


def translate_body(body: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """A response object."""
    if with_summary(dialect, body["reasoning"]) != "summary":
        return body
    return {**body, "output": translate_items(body["output"], "summary")}


def translate_items(items: Sequence[dict[str, Any]], dialect: Dialect) -> list[dict[str, Any]]:
    return [_as_summary(item) for item in items] if dialect == "summary" else list(items)


def translate_piece(piece: bytes, dialect: Dialect) -> bytes:
    """SSE bytes of whole frames."""
    if dialect == "open-responses":
        for ours, theirs in _OPEN_NAMES:
            piece = piece.replace(ours, theirs)
        if _ERROR in piece:
            piece = b"\n\n".join(map(_frame_with_error, piece.split(b"\n\n")))
    elif dialect == "summary" and b"reasoning" in piece:
        piece = b"\n\n".join(map(_frame_as_summary, piece.split(b"\n\n")))
    return piece


def _frame_with_error(frame: bytes) -> bytes:
    """The error event with its payload one level down."""
    if not frame.startswith(_ERROR):
        return frame
    event = _decode(frame.removeprefix(_ERROR))
    kind = "invalid_request_error" if event["code"] in _REQUEST_CODES else "server_error"
    error = {"type": kind, **{key: event[key] for key in ("code", "message", "param")}}
    return _ERROR + _encode({"type": "error", "error": error, "sequence_number": event["sequence_number"]})


def _frame_as_summary(frame: bytes) -> bytes:
    _, _, data = frame.partition(b"\ndata: ")
    if b"reasoning" not in frame or not data:
        return frame
    event = _decode(data)
    _event_as_summary(event)
    return b"event: %s\ndata: %s" % (event["type"].encode(), _encode(event))


def _event_as_summary(event: dict[str, Any]) -> None:
    if "response" in event:
        event["response"] = translate_body(event["response"], "summary")
    elif "item" in event:
        event["item"] = _as_summary(event["item"])
    elif event["type"].startswith("response.reasoning_text.") or _is_reasoning(event.get("part")):
        event["type"] = _SUMMARY_NAMES[event["type"]]
        event["summary_index"] = event.pop("content_index")
        if "part" in event:
            event["part"] = {**event["part"], "type": "summary_text"}


def _as_summary(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "reasoning":
        return item
    summary = [{**part, "type": "summary_text"} for part in item["content"]]
    return {**item, "summary": [*item["summary"], *summary], "content": []}


def _is_reasoning(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "reasoning_text"
