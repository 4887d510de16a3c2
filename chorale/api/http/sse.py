"""Server-sent events as bytes, and Template: an event whose text is filled in later."""

from __future__ import annotations

from typing import Any

import msgspec

from chorale.errors import ChoraleError

DONE = b"data: [DONE]\n\n"
PLACEHOLDER = "\x00text\x00"
_encode = msgspec.json.Encoder().encode
_ENCODED_PLACEHOLDER = _encode(PLACEHOLDER)


def event(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


def error_event(error: ChoraleError) -> bytes:
    return event({"error": error.to_dict()})


def last_error(error: ChoraleError) -> bytes:
    """The end of a stream of chunks that failed."""
    return error_event(error) + DONE


class Template:
    """An event encoded once around ``PLACEHOLDER``, wherever that stands, then filled per token.

    One token's chunk differs from the one before only in its text; filling is a tenth of the cost of
    encoding the object.
    """

    __slots__ = ("_pieces",)

    def __init__(self, data: Any) -> None:
        self._pieces = event(data).split(_ENCODED_PLACEHOLDER)

    def fill(self, text: str) -> bytes:
        return _encode(text).join(self._pieces)
