"""The exact tokens of reasoning, as a string that a stateless client keeps and sends back.

It is the signature of a thinking block in Anthropic's API, and ``encrypted_content`` in OpenAI's. It is not
encrypted, since the same client has seen the text. Only content tokens are accepted, no control tokens, so a
forged string has no more effect than the same content sent as text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any

from chorale.api.limits import SIZES
from chorale.errors import RequestError
from chorale.harmony.vocab import CHANNEL, MESSAGE, NUM_RANKS, Vocabulary

_PREFIX = "cho1."
_MAX_TOKENS = 131_072  # the model's context window
_MAX_CHARS = len(_PREFIX) + _MAX_TOKENS * 4  # at most three bytes, or four base64 characters, per token
_NOT_LAST = bytes(range(0x80, 0x100))  # bytes that do not end a token id


def write_reasoning(token_ids: Iterable[int]) -> str:
    """Returns the token ids as LEB128 integers (7-bit groups, lowest first) in base64, after a prefix."""
    out = bytearray()
    for token in token_ids:
        while token >= 0x80:
            out.append(token & 0x7F | 0x80)
            token >>= 7
        out.append(token)
    return _PREFIX + base64.b64encode(bytes(out)).decode()


def read_reasoning(value: Any) -> tuple[int, ...]:
    """Returns the content tokens, or () if the value is not from this server or is damaged."""
    if not isinstance(value, str) or not value.startswith(_PREFIX) or len(value) > _MAX_CHARS:
        return ()
    try:
        data = base64.b64decode(value[len(_PREFIX) :], validate=True)
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


class ReasoningReader:
    """Reads the reasoning strings of one request, and limits their total number of tokens."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._num_tokens = 0

    def read(self, value: Any, text: str, path: str) -> tuple[str, tuple[int, ...]] | None:
        """Returns the text, and the token ids of its harmony message.

        Returns None if ``text`` must be used instead: the value is not from this server, is damaged, or
        decodes to another, nonempty ``text``. Raises ``RequestError`` naming ``path`` for too many tokens.
        """
        tokens = read_reasoning(value)
        self._num_tokens += len(tokens)
        most = SIZES["thought_tokens"].max
        if self._num_tokens > most:
            raise RequestError(
                f"{path}: a request may contain {most} reasoning tokens in total",
                param=path,
                code="above_max_value",
            )
        said = self._vocab.decode(tokens)
        if not tokens or text not in ("", said):
            return None
        return said, (CHANNEL, *self._vocab.encode("analysis"), MESSAGE, *tokens)
