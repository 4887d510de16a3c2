"""The event log of a background response: the turn's events, from which each reader's stream is rendered.

A chunk of the log is a msgpack array: the format version, then one array per event with a tag and the
event's fields in order. New fields of a class in ``_CLASSES`` must come last and have a default. Tags never
change. ``TurnEnded`` is not logged: its status, usage and error are in the stored response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from chorale.engine.types import TokenLogprobs
from chorale.errors import ChoraleError
from chorale.tools import contract as tools
from chorale.turns.events import (
    Cited,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    OutputEvent,
    PromptScored,
    ToolOutcome,
    ToolProgressed,
    ToolStarted,
    TurnEnded,
    TurnProgress,
)

_VERSION = 1
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


@dataclass(frozen=True, slots=True)
class TurnBegan:
    """The turn produced its first events: the response is now in progress."""


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """The ``error`` event of the stream, before its terminal event."""

    code: str | None
    message: str
    param: str | None

    @staticmethod
    def of(error: ChoraleError) -> TurnFailed:
        return TurnFailed(error.code, error.message, error.param)


LogEvent = OutputEvent | TurnBegan | TurnFailed

_NOT_LOGGED = (TurnEnded, TurnProgress, PromptScored)
_DELTA = 0  # tag of ItemDelta; an integer is shorter, and there is one per token
_CLASSES: dict[str, type[Any]] = {
    "began": TurnBegan, "failed": TurnFailed, "opened": ItemOpened, "closed": ItemClosed, "cited": Cited,
    "citation": tools.UrlCitation, "tool_started": ToolStarted, "tool_progressed": ToolProgressed,
    "tool_outcome": ToolOutcome, "code_started": tools.CodeStarted, "code_output": tools.CodeOutput,
    "mcp_progress": tools.McpProgress, "result": tools.ToolResult, "python": tools.PythonDetail,
    "mcp": tools.McpDetail, "search": tools.SearchAction, "open_page": tools.OpenPageAction,
    "find": tools.FindAction, "source": tools.Source, "listing": tools.McpListing,
    "mcp_tool": tools.McpToolInfo,
}  # fmt: skip
# Tags that are read and no longer written.
_OLD: dict[str, Callable[..., Any]] = {
    "search_started": tools.SearchAction, "page_opening": tools.OpenPageAction,
    "find_started": tools.FindAction, "browser": lambda action: action,
}  # fmt: skip
_READERS = _CLASSES | _OLD
_TAGS = {cls: tag for tag, cls in _CLASSES.items()}
_FIELDS = {cls: [field.name for field in fields(cls)] for cls in _TAGS}


def pack(event: LogEvent) -> bytes | None:
    """Returns an event encoded for a chunk, or None if it is not logged."""
    if isinstance(event, ItemDelta):
        return _encode((_DELTA, event.index, event.text, event.token_ids, event.logprobs))
    return None if isinstance(event, _NOT_LOGGED) else _encode(_plain(event))


def join(packed: list[bytes]) -> bytes:
    """Returns a chunk of packed events: a msgpack array with a length of four bytes."""
    return b"\xdd%s%s%s" % ((len(packed) + 1).to_bytes(4, "big"), _encode(_VERSION), b"".join(packed))


def read_chunk(data: bytes) -> list[LogEvent]:
    version, *events = _decode(data)
    assert version == _VERSION, "a store of another format is not opened"
    return [_delta(event) if event[0] == _DELTA else _object(event) for event in events]


def _plain(value: Any) -> Any:
    """Returns an object as ``[tag, *fields]``, and objects in its fields likewise."""
    tag = _TAGS.get(type(value))
    if tag is not None:
        return [tag, *(_plain(getattr(value, name)) for name in _FIELDS[type(value)])]
    if isinstance(value, tuple) and value and type(value[0]) in _TAGS:
        return [_plain(entry) for entry in value]
    return dict(value) if isinstance(value, Mapping) else value


def _object(plain: list[Any]) -> Any:
    return _READERS[plain[0]](*map(_field, plain[1:]))


def _field(plain: Any) -> Any:
    """Reverses ``_plain``. A list is one object, a list of objects or a list of numbers, never of strings."""
    if not isinstance(plain, list):
        return plain
    if plain and isinstance(plain[0], str):
        return _object(plain)
    return tuple(map(_object, plain)) if plain and isinstance(plain[0], list) else tuple(plain)


def _delta(plain: list[Any]) -> ItemDelta:
    _, index, text, token_ids, logprobs = plain
    return ItemDelta(index, text, tuple(token_ids), tuple(TokenLogprobs(*entry) for entry in logprobs))
