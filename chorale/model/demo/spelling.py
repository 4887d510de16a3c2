"""The tokens that spell a word without its leading space, or with one.

" disposal" is one token; after a quotation mark the same word is "dis" + "posal". A token's own bytes do not
show a model those pieces, so the features contain them (see ``features``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_PIECES = 3
_MAX_BYTES = 16  # longer words are rare and the most expensive


def other_forms(token_bytes: list[bytes]) -> npt.NDArray[np.int64]:
    """Return [V, MAX_PIECES]: the tokens that spell a token's word in its other form; -1 after the last.

    The other form of " word" is "word" and vice versa. A row is all -1 for a token that is no word, and for
    one whose other form is a single token, because both have the same features. Of words with more pieces,
    the first ones are kept.
    """
    ranks = {token: rank for rank, token in enumerate(token_bytes)}
    forms = np.full((len(token_bytes), MAX_PIECES), -1, np.int64)
    for index, token in enumerate(token_bytes):
        if len(token) > _MAX_BYTES:
            continue
        other = token[1:] if token[:1] == b" " else b" " + token
        if other in ranks or not _is_word(token):
            continue
        pieces = [ranks.get(piece, -1) for piece in merge(other, ranks)][:MAX_PIECES]
        if -1 not in pieces:
            forms[index, : len(pieces)] = pieces
    return forms


def _is_word(token: bytes) -> bool:
    word = token.removeprefix(b" ")
    if word.isascii():
        return word.isalpha()
    try:
        return word.decode().isalpha()
    except UnicodeDecodeError:
        return False


def merge(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Encode one word with byte-pair encoding: merge the pair of the lowest rank until no pair is a token."""
    parts = [word[i : i + 1] for i in range(len(word))]
    none = len(ranks)
    pairs = [ranks.get(word[i : i + 2], none) for i in range(len(word) - 1)]
    while pairs:
        lowest = min(pairs)
        if lowest == none:
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del pairs[at]
        if at < len(pairs):
            pairs[at] = ranks.get(parts[at] + parts[at + 1], none)
        if at:
            pairs[at - 1] = ranks.get(parts[at - 1] + parts[at], none)
    return parts
