"""delivery: what is done to a stream on its way to one client: names of another dialect, obfuscation.

Events are made and stored once, in OpenAI's names; both transformations work on whole SSE frames.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal, get_args

from starlette.requests import Request

from chorale.config import ServerConfig
from chorale.errors import RequestError

Dialect = Literal["openai", "open-responses"]
DIALECT_HEADER = "x-responses-dialect"

_BLOCK = 64  # bytes: obfuscated events are a multiple of this long
# A frame's first line and the start of its second. No text can hold them: JSON has no line breaks.
_NAMES = tuple(
    (
        f'event: response.reasoning_text.{end}\ndata: {{"type":"response.reasoning_text.{end}"'.encode(),
        f'event: response.reasoning.{end}\ndata: {{"type":"response.reasoning.{end}"'.encode(),
    )
    for end in ("delta", "done")
)


def dialect_of(request: Request, config: ServerConfig) -> Dialect:
    """The header's, else the server's. Raises ``RequestError`` for one that is unknown."""
    asked = request.headers.get(DIALECT_HEADER)
    if asked is None:
        return config.responses_dialect
    for dialect in get_args(Dialect):
        if asked == dialect:
            return dialect  # type: ignore[no-any-return]
    raise RequestError(
        f"{DIALECT_HEADER}: must be one of {', '.join(get_args(Dialect))}", param=DIALECT_HEADER
    )


async def deliver(source: AsyncGenerator[bytes], dialect: Dialect, obfuscate: bool) -> AsyncGenerator[bytes]:
    """Pieces of whole frames in, the same out. Closing it closes ``source``."""
    async with aclosing(source):
        async for piece in source:
            if dialect == "open-responses":
                piece = in_open_responses(piece)
            yield obfuscated(piece) if obfuscate else piece


def in_open_responses(piece: bytes) -> bytes:
    """``response.reasoning.delta`` and ``.done``, as openresponses.org names them."""
    for ours, theirs in _NAMES:
        piece = piece.replace(ours, theirs)
    return piece


def obfuscated(piece: bytes) -> bytes:
    """Every delta event with an ``obfuscation`` that hides how long its text is."""
    frames = piece.split(b"\n\n")
    return b"\n\n".join(map(_pad, frames))


def _pad(frame: bytes) -> bytes:
    name, _, data = frame.partition(b"\n")
    if not name.endswith(b".delta"):
        return frame
    num_missing = -(len(frame) + len(b',"obfuscation":""')) % _BLOCK
    noise = secrets.token_hex(_BLOCK // 2).encode()[:num_missing]
    return b'%s\n%s,"obfuscation":"%s"}' % (name, data[:-1], noise)
