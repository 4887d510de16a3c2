"""Server-sent events as bytes, and templates of events whose text is filled in later."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from chorale.errors import ChoraleError

DONE = b"data: [DONE]\n\n"
PLACEHOLDER = "\x00text\x00"
encode = msgspec.json.Encoder().encode
_ENCODED_PLACEHOLDER = encode(PLACEHOLDER)
_COMMENT = b": waiting\n\n"

Frame = tuple[bytes, bytes]  # an event's name and its JSON


def frame(kind: bytes, data: bytes) -> bytes:
    """Returns a named event. ``data`` is its JSON."""
    return b"event: %s\ndata: %s\n\n" % (kind, data)


async def framed(source: AsyncGenerator[list[Frame]], last: bytes = b"") -> AsyncGenerator[bytes]:
    """Yields each list of frames as bytes, then ``last``. Closing it closes ``source``.

    An empty list becomes a comment, so that the client receives the headers before the first event.
    """
    async with aclosing(source):
        async for frames in source:
            yield b"".join([frame(kind, data) for kind, data in frames]) or _COMMENT
        if last:
            yield last


def event(data: Any) -> bytes:
    """Returns an event without a name."""
    return b"data: " + encode(data) + b"\n\n"


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
        return encode(text).join(self._pieces)
