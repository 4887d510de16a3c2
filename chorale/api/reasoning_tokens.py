"""The exact tokens of reasoning, as a string that a stateless client keeps and brings back.

Anthropic's API has it as the signature of a thinking block, OpenAI's as ``encrypted_content``. It is not a
secret: what is inside was shown to the same client. It holds content tokens only, and reading one lets
nothing else through: a client that writes such a string can say in it what it could say in the text.
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
_MAX_TOKENS = 131_072  # the model's window: no reasoning is longer
_MAX_CHARS = len(_PREFIX) + _MAX_TOKENS * 4  # three bytes a token at most
_NOT_LAST = bytes(range(0x80, 0x100))  # bytes after which a token goes on


def write_reasoning(token_ids: Iterable[int]) -> str:
    """Token ids as numbers of 7-bit groups, in base64."""
    out = bytearray()
    for token in token_ids:
        while token >= 0x80:
            out.append(token & 0x7F | 0x80)
            token >>= 7
        out.append(token)
    return _PREFIX + base64.b64encode(bytes(out)).decode()


def read_reasoning(value: Any) -> tuple[int, ...]:
    """The content tokens. Returns none if the value is not ours, or damaged."""
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
    """Reads the reasoning that one request brings back: a bounded number of tokens in all."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._num_tokens = 0

    def read(self, value: Any, text: str, path: str) -> tuple[str, tuple[int, ...]] | None:
        """The text, and the token ids of its harmony message.

        Returns None where the text must do: the value is not ours, damaged, or says something else than
        ``text``, unless that is empty. Raises ``RequestError`` naming ``path`` for too many tokens.
        """
        tokens = read_reasoning(value)
        self._num_tokens += len(tokens)
        most = SIZES["thought_tokens"].max
        if self._num_tokens > most:
            raise RequestError(
                f"{path}: the reasoning of a request may hold {most} tokens together",
                param=path,
                code="above_max_value",
            )
        said = self._vocab.decode(tokens)
        if not tokens or text not in ("", said):
            return None
        return said, (CHANNEL, *self._vocab.encode("analysis"), MESSAGE, *tokens)
