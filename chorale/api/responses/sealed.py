"""Text as ``encrypted_content``: what a client keeps for a server that stores nothing.

Sealed is not secret: what is inside was shown to the same client, or is its own conversation. The form is a
version, then base64 of the compressed text. It holds text only, never token ids: a client can write such a
string itself, and what it writes must not reach the model as anything but ordinary text.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass

from chorale.errors import RequestError

_VERSION = "chorale1."
MAX_CHARS = 4 * 2**20  # no reasoning of one context window is longer


_BETWEEN = "\x1e"  # stands between the texts of a compaction; ASCII's record separator


@dataclass(frozen=True, slots=True)
class Compacted:
    """What stands for a conversation. ``unanswered``: the user's last messages, word for word."""

    summary: str
    unanswered: tuple[str, ...] = ()


def pack(compacted: Compacted) -> str:
    texts = (compacted.summary, *compacted.unanswered)
    return _BETWEEN.join(text.replace(_BETWEEN, " ") for text in texts)


def unpack(text: str) -> Compacted:
    summary, *unanswered = text.split(_BETWEEN)
    return Compacted(summary, tuple(unanswered))


def seal(text: str) -> str:
    return _VERSION + base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 6)).decode()


def unseal(sealed: str, path: str) -> str | None:
    """The text; None for what another server sealed. Raises ``RequestError`` for a damaged one of ours."""
    if not sealed.startswith(_VERSION):
        return None
    try:
        packed = base64.b64decode(sealed[len(_VERSION) :], validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, MAX_CHARS)
        if not unpacker.eof:
            raise ValueError("cut or too long")
        return data.decode("utf-8", "surrogatepass")
    except (binascii.Error, zlib.error, ValueError):
        raise RequestError(f"{path}: is damaged or too long", param=path) from None
