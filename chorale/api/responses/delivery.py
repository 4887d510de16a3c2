"""deliver: a stream on its way to one client: in its dialect, and obfuscated if it asks for that."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing

from chorale.api.responses.dialects import Dialect, translate_piece

_BLOCK = 64  # bytes: obfuscated events are a multiple of this long


async def deliver(source: AsyncGenerator[bytes], dialect: Dialect, obfuscate: bool) -> AsyncGenerator[bytes]:
    """Pieces of whole frames in, the same out. Closing it closes ``source``."""
    async with aclosing(source):
        async for piece in source:
            if dialect != "openai":
                piece = translate_piece(piece, dialect)
            yield obfuscated(piece) if obfuscate else piece


async def http_stream(
    source: AsyncGenerator[bytes], dialect: Dialect, obfuscate: bool
) -> AsyncGenerator[bytes]:
    """As ``deliver``, for server-sent events: Open Responses ends them with ``[DONE]``, OpenAI does not."""
    async with aclosing(deliver(source, dialect, obfuscate)) as pieces:
        async for piece in pieces:
            yield piece
        if dialect == "open-responses":
            yield b"data: [DONE]\n\n"


def obfuscated(piece: bytes) -> bytes:
    """Every delta event with an ``obfuscation`` that hides how long its text is."""
    return b"\n\n".join(map(_pad, piece.split(b"\n\n")))


def _pad(frame: bytes) -> bytes:
    name, _, data = frame.partition(b"\n")
    if not name.endswith(b".delta"):
        return frame
    num_missing = -(len(frame) + len(b',"obfuscation":""')) % _BLOCK
    noise = secrets.token_hex(_BLOCK // 2).encode()[:num_missing]
    return b'%s\n%s,"obfuscation":"%s"}' % (name, data[:-1], noise)
