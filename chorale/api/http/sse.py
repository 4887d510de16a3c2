"""Server-sent events as bytes, and templates of events whose text is filled in later."""

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
    """Returns the final events of a stream of chunks that failed."""
    return error_event(error) + DONE


class Template:
    """An event that is encoded once, with ``PLACEHOLDER`` in place of its text, and filled for each token.

    Successive chunks differ only in their text; filling costs a tenth of encoding the object.
    """

    __slots__ = ("_pieces",)

    def __init__(self, data: Any) -> None:
        self._pieces = event(data).split(_ENCODED_PLACEHOLDER)

    def fill(self, text: str) -> bytes:
        return _encode(text).join(self._pieces)
