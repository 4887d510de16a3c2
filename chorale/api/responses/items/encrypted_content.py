"""Text in ``encrypted_content``: the summary of a conversation, which the client keeps.

The text is not encrypted, because it comes from the client's own conversation. The format is a version, then
base64 of the compressed text. ``api.reasoning_tokens`` writes that of reasoning, which has token ids.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable

from chorale.errors import RequestError, invalid
from chorale.store.protocol import Item

_VERSION = "chorale1."
MAX_BYTES = 4 * 2**20  # UTF-8 bytes of all these texts in a request; more than any context window
_MAX_SEALED = MAX_BYTES * 4 // 3 + 4096  # maximum length of an encoded text within the limit


class Budget:
    """The remaining limit of unpacked bytes for the texts of one request."""

    __slots__ = ("left",)

    def __init__(self, left: int = MAX_BYTES) -> None:
        self.left = left


_SEPARATOR = "\x1e"  # between the texts of a compaction; ASCII's record separator


def pack(summary: str, unanswered: Iterable[str] = ()) -> str:
    """Returns the text of a compaction item. ``unanswered``: the user's last messages, verbatim."""
    return _SEPARATOR.join(text.replace(_SEPARATOR, " ") for text in (summary, *unanswered))


def unpack(text: str) -> tuple[str, tuple[str, ...]]:
    """Returns the summary and the unanswered messages."""
    summary, *unanswered = text.split(_SEPARATOR)
    return summary, tuple(unanswered)


def seal(text: str) -> str:
    return _VERSION + base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 6)).decode()


def unseal(sealed: str, path: str, budget: Budget | None = None) -> str | None:
    """Returns the text, or None for a string that is not from Chorale. Unpacks at most ``budget.left`` bytes.

    Raises ``RequestError`` for a string that is damaged or too long.
    """
    if not sealed.startswith(_VERSION):
        return None
    budget = budget or Budget()
    if len(sealed) > _MAX_SEALED:
        raise _too_long(path)
    try:
        packed = base64.b64decode(sealed[len(_VERSION) :], validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, budget.left + 1)
        if len(data) > budget.left:
            budget.left = 0
            raise _too_long(path)
        budget.left -= len(data)
        if not unpacker.eof:
            raise ValueError("cut")
        return data.decode("utf-8", "surrogatepass")
    except (binascii.Error, zlib.error, ValueError):
        raise invalid(path, "is damaged") from None


def _too_long(path: str) -> RequestError:
    return RequestError(
        f"{path}: all encrypted_content of a request may unpack to at most {MAX_BYTES // 2**20} MiB",
        param=path,
        code="string_above_max_length",
    )


def compaction_object(item_id: str, packed: str) -> Item:
    return {"id": item_id, "type": "compaction", "encrypted_content": seal(packed) if packed else ""}
