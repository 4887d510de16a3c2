"""Signatures of thinking blocks: the exact tokens of a thought, so that it is replayed as it was.

A signature holds content tokens only, and reading one lets nothing else through: a client that writes its
own can say in it what it could say in the text. Signatures of other servers say nothing here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable

from chorale.harmony.vocab import NUM_RANKS

_PREFIX = "cho1."
_MAX_TOKENS = 131_072  # the model's window: no thought is longer
_MAX_CHARS = len(_PREFIX) + _MAX_TOKENS * 4  # three bytes a token at most
_NOT_LAST = bytes(range(0x80, 0x100))  # bytes after which a token goes on


def write_signature(token_ids: Iterable[int]) -> str:
    """Token ids as numbers of 7-bit groups, in base64."""
    out = bytearray()
    for token in token_ids:
        while token >= 0x80:
            out.append(token & 0x7F | 0x80)
            token >>= 7
        out.append(token)
    return _PREFIX + base64.b64encode(bytes(out)).decode()


def read_signature(signature: str) -> tuple[int, ...]:
    """The content tokens, or none: not ours, or damaged."""
    if not signature.startswith(_PREFIX) or len(signature) > _MAX_CHARS:
        return ()
    try:
        data = base64.b64decode(signature[len(_PREFIX) :], validate=True)
    except (binascii.Error, ValueError):
        return ()
    if len(data.translate(None, _NOT_LAST)) > _MAX_TOKENS:
        return ()
    found: list[int] = []
    token = shift = 0
    for byte in data:
        token |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            found.append(token)
            token = shift = 0
        elif shift > 21:
            return ()
    if shift or any(token >= NUM_RANKS for token in found):
        return ()
    return tuple(found)
