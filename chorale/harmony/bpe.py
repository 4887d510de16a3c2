"""Text to token ids, in time linear in the text, exactly as tiktoken would encode it.

tiktoken is used for everything ordinary. Two things of it are not: a piece of a megabyte (the regular
expression's unit: a word, a run of punctuation, a run of spaces) costs n log n with poor locality
(0.3-0.8 s/MB), and a long run of white space overflows the stack of its regex engine, which surfaces as a
panic. So pieces beyond about a thousand characters are found first and encoded here, by windows.

The windows rest on a property of byte-pair encoding with a vocabulary that was grown by merging (as o200k
was): a sequence of tokens is *the* encoding of its bytes if and only if each adjacent pair of it is the
encoding of its own bytes. So two windows may be joined wherever the second begins with the very token that
the first had at that place: each adjacent pair of the result then occurs inside one true encoding.

What is guaranteed: the ids are tiktoken's for every text; time is linear for text whose windows join (all
that we could construct), and n log n otherwise. The C code works on slices of at most a few kilobytes or
releases the GIL, so other threads go on; call it in a thread for texts beyond some tens of kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

# How o200k cuts text into pieces before merging; part of the vocabulary's definition.
PIECE_PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

BLOCK = 512  # characters; a piece of 3 * BLOCK or more covers an aligned block of one kind
WINDOW = 512  # bytes; larger windows cost more per byte (measured: 54 us/kB at 512, 68 at 4,096)
MEMO_SIZE = 64

# One block that could lie within one piece. Fails after a few characters on ordinary text.
_BLOCK_PATTERN = rf"[{UPPER}]*+[{LOWER}]*+|[^\s\p{{L}}\p{{N}}]*+[\r\n/]*+|\s++"

# Places where a piece certainly begins, whatever stands before: at a lone space before a non-space, and
# between an ASCII letter or digit and a symbol that no contraction starts with. Searched backwards.
_CUT_PATTERN = r"(?r) (?=\S)|(?<=[A-Za-z0-9])(?=[\"#$%&()*+,\-.:;<=>?@\[\\\]^_`{|}~!/])"


class LinearEncoder:
    """``encode(text)``: ids of ordinary text. Holds compiled patterns; safe to share between threads."""

    def __init__(self, core: Any, token_bytes: Sequence[bytes]) -> None:
        """``core``: tiktoken's CoreBPE. ``token_bytes[id]``: the bytes of each token."""
        import regex  # type: ignore[import-untyped]  # comes with tiktoken

        self._encode_ordinary = core.encode_ordinary
        self._encode_piece = core.encode_single_piece
        self._token_bytes = token_bytes
        self._piece = regex.compile(PIECE_PATTERN)
        self._block = regex.compile(_BLOCK_PATTERN)
        self._cut = regex.compile(_CUT_PATTERN)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens' names in it are ordinary text. Lone surrogates become U+FFFD."""
        if len(text) < 3 * BLOCK:
            try:
                ids: list[int] = self._encode_ordinary(text)
                return ids
            except UnicodeEncodeError:
                return self.encode(replace_surrogates(text))
        try:
            text.encode()
        except UnicodeEncodeError:
            text = replace_surrogates(text)
        return self._encode_long(text)

    def _encode_long(self, text: str) -> list[int]:
        ids: list[int] = []
        done = 0  # always where a piece begins
        while (block := self._find_block(text, done)) is not None:
            cut = self._cut.search(text, done, block)
            start = cut.start() if cut is not None else done
            ids += self._encode_ordinary(text[done:start])
            for piece, end in self._pieces(text, start, block + BLOCK):
                done = end
                ids += self._encode_windows(piece) if len(piece) > WINDOW else self._encode_piece(piece)
        ids += self._encode_ordinary(text[done:])
        return ids

    def _find_block(self, text: str, start: int) -> int | None:
        """Where the next aligned block of one kind begins, at or after ``start``."""
        fullmatch = self._block.fullmatch
        for position in range(start, len(text) - BLOCK + 1, BLOCK):
            if fullmatch(text, position, position + BLOCK):
                return position
        return None

    def _pieces(self, text: str, start: int, stop: int) -> Iterator[tuple[bytes, int]]:
        """The pieces from ``start`` to the first that ends at or after ``stop``, each with its end."""
        for match in self._piece.finditer(text, start):
            yield match.group().encode(), match.end()
            if match.end() >= stop:
                return

    def _encode_windows(self, piece: bytes) -> list[int]:
        """Ids of one long piece. Windows join where the next one begins with the token expected there."""
        memo: dict[bytes, list[int]] = {}  # runs repeat: most windows were seen before
        out: list[int] = []
        start, size = 0, WINDOW
        ids: list[int] = self._encode_piece(piece[:size])
        while start + size < len(piece):
            joined = self._join(piece, start + size, ids, memo)
            if joined is None:
                size *= 2
                ids = self._encode_piece(piece[start : start + size])
                continue
            keep, start, following = joined
            out += ids[:keep]
            ids, size = following, WINDOW
        return out + ids

    def _join(
        self, piece: bytes, end: int, ids: list[int], memo: dict[bytes, list[int]]
    ) -> tuple[int, int, list[int]] | None:
        """(tokens to keep of ``ids``, where the next window starts, its ids), or None: no place to join.

        ``ids`` encode the bytes before ``end``. The last few tokens are given up, as later bytes may
        change them; if the next window disagrees, more are.
        """
        drop = max(1, min(4, len(ids) // 2))
        while drop < len(ids):
            start = end - sum(len(self._token_bytes[i]) for i in ids[-drop:])
            window = piece[start : start + WINDOW]
            following = memo.get(window)
            if following is None:
                if len(memo) >= MEMO_SIZE:
                    memo.clear()
                following = memo[window] = self._encode_piece(window)
            if following[0] == ids[-drop]:
                return len(ids) - drop, start, following
            drop *= 2
        return None


def replace_surrogates(text: str) -> str:
    """Surrogate pairs become the character they mean; a lone surrogate becomes U+FFFD, as in tiktoken."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
