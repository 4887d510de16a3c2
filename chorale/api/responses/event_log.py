"""The event log of a background response: the turn's events, from which each reader's stream is rendered.

A chunk of the log is a msgpack array: the format version, then one array per event with a tag and the
event's fields in order. ``TurnEnded`` is not logged: its status, usage and error are in the stored response.
"""

from __future__ import annotations

from typing import Any

import msgspec

from chorale.errors import ChoraleError
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


class TurnBegan(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """The turn produced its first events: the response is now in progress."""


class TurnFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The ``error`` event of the stream, before its terminal event."""

    code: str | None
    message: str
    param: str | None

    @staticmethod
    def of(error: ChoraleError) -> TurnFailed:
        return TurnFailed(error.code, error.message, error.param)


LogEvent = OutputEvent | TurnBegan | TurnFailed

_NOT_LOGGED = (TurnEnded, TurnProgress, PromptScored)
_NAMED = TurnBegan | TurnFailed | ItemOpened | ItemClosed | Cited | ToolStarted | ToolProgressed | ToolOutcome
_encode = msgspec.msgpack.Encoder().encode
_split = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_delta = msgspec.msgpack.Decoder(ItemDelta).decode
_named: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_NAMED)


def pack(event: LogEvent) -> bytes | None:
    """Returns an event encoded for a chunk, or None if it is not logged."""
    return None if isinstance(event, _NOT_LOGGED) else _encode(event)


def join(packed: list[bytes]) -> bytes:
    """Returns a chunk of packed events: a msgpack array with a length of four bytes."""
    return b"\xdd%s%s%s" % ((len(packed) + 1).to_bytes(4, "big"), _encode(_VERSION), b"".join(packed))


def read_chunk(data: bytes) -> list[LogEvent]:
    version, *events = map(bytes, _split(data))
    assert version == _encode(_VERSION), "a store of another format is not opened"
    # The array of an event has a length of one byte, and 0 is the tag of a delta.
    return [_delta(event) if event[1] == 0 else _named.decode(event) for event in events]
