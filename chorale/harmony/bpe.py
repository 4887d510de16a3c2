"""Text to token ids, in time linear in the text, exactly as tiktoken would encode it.

tiktoken encodes ordinary text, with two exceptions. A piece (what its regular expression matches: a word, a
run of punctuation, a run of spaces) of a megabyte takes n log n time with poor locality (0.3-0.8 s/MB), and a
long run of white space overflows the stack of its regex engine and causes a panic. So pieces longer than
about a thousand characters are found first and encoded here, in windows.

The windows rely on a property of byte-pair encoding with a vocabulary that was grown by merging (like o200k):
a sequence of tokens is *the* encoding of its bytes if and only if each adjacent pair is the encoding of its
own bytes. So two windows can be joined wherever the second begins with the same token that the first has at
that position: each adjacent pair of the result then occurs inside one true encoding.

Piece boundaries depend on Unicode's tables, and those of the regex package may be newer than tiktoken's. So
long text is split by means of a shadow: the same text, with each character on which the two disagree (found
by probing tiktoken) replaced by a character of the kind that tiktoken assigns.

Guarantees: the ids equal tiktoken's for all text. Time is linear if the windows can be joined (true of all
text that we could construct), and n log n otherwise. C code that holds the GIL gets at most ``SLICE``
characters at once, so other threads can run; call it in a thread for text beyond some tens of kilobytes.
"""

from __future__ import annotations

import unicodedata
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
SLICE = 65536  # characters per call of C code, which holds the GIL while it creates the list of ids
RUN = 8192  # pieces per call of C code, for text without a certain cut

# One block that could lie within one piece. Fails after a few characters on ordinary text.
_BLOCK_PATTERN = rf"[{UPPER}]*+[{LOWER}]*+|[^\s\p{{L}}\p{{N}}]*+[\r\n/]*+|\s++"

# Positions where a piece certainly begins, whatever precedes: at a lone space before a non-space, between
# an ASCII letter or digit and white space or a symbol that no contraction starts with, and at the start of
# a line. Searched backwards.
_CUT_PATTERN = (
    r"(?r) (?=\S)|(?<=[A-Za-z0-9])(?=[\t\r\n\"#$%&()*+,\-.:;<=>?@\[\\\]^_`{|}~!/])|(?<=[\r\n])(?=[!-.0-~])"
)
# Consecutive pieces, for text without such positions. Digits come first, many of their pieces at once.
# The last kind of piece, a single space, includes the next piece: at the end it would join the spaces before.
_RUN_PATTERN = rf"(?>(?:\p{{N}}{{3}}){{1,64}}+|{PIECE_PATTERN}(?>{PIECE_PATTERN})){{1,%d}}+"

# The kinds of characters that the pattern of pieces tells apart, white space aside.
_KIND_PATTERN = r"(?P<letter>[\p{L}\p{M}])|(?P<number>\p{N})|(?P<symbol>(?s:.))"
_STAND_INS = {"letter": "日", "number": "²", "symbol": "\ufffd"}


class LinearEncoder:
    """``encode(text)``: ids of ordinary text. Holds compiled patterns; safe to share between threads."""

    def __init__(self, core: Any, token_bytes: Sequence[bytes]) -> None:
        """``core``: tiktoken's CoreBPE. ``token_bytes[id]``: the bytes of each token."""
        import regex  # type: ignore[import-untyped]  # comes with tiktoken

        self._encode_ordinary = core.encode_ordinary
        self._encode_piece = core.encode_single_piece
        self._token_bytes = token_bytes
        self._piece = regex.compile(PIECE_PATTERN)
        self._run = regex.compile(_RUN_PATTERN % RUN)
        self._block = regex.compile(_BLOCK_PATTERN)
        self._cut = regex.compile(_CUT_PATTERN)
        self._kind = regex.compile(_KIND_PATTERN)
        self._known: set[str] = set()  # characters that were compared with tiktoken's tables
        self._stand_ins: dict[int, str] = {}  # code of a character that differs -> its stand-in

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Returns ids of ``text``; special tokens' names in it are ordinary text. Lone surrogates become
        U+FFFD.

        Stops early above ``most`` ids: the result is then partial, and longer than ``most``."""
        if len(text) < 3 * BLOCK:
            try:
                ids: list[int] = self._encode_ordinary(text)
                return ids
            except UnicodeEncodeError:
                return self.encode(replace_surrogates(text), most)
        try:
            text.encode()
        except UnicodeEncodeError:
            text = replace_surrogates(text)
        # A character is at most four bytes, and a token at least one.
        return self._encode_long(text, 4 * len(text) if most is None else most)

    def _encode_long(self, text: str, most: int) -> list[int]:
        ids: list[int] = []
        done = 0  # characters encoded so far; the next piece begins here
        shadow = self._shadow(text)
        while (block := self._find_block(shadow, done)) is not None:
            cut = self._cut.search(shadow, done, block, concurrent=True)
            start = cut.start() if cut is not None else done
            self._encode_slices(text, shadow, done, start, ids, most)
            for begin, end in self._pieces(shadow, start, block + BLOCK):
                piece = text[begin:end].encode()
                done = end
                room = most - len(ids)
                ids += self._encode_windows(piece, room) if len(piece) > WINDOW else self._encode_piece(piece)
            if len(ids) > most:
                return ids
        self._encode_slices(text, shadow, done, len(text), ids, most)
        return ids

    def _encode_slices(
        self, text: str, shadow: str, start: int, stop: int, ids: list[int], most: int
    ) -> None:
        """Adds the ids of a part without long pieces, which begins and ends where pieces do."""
        while stop - start > SLICE and len(ids) <= most:
            cut = self._cut.search(text, start + 1, start + SLICE)
            run = None if cut is not None else self._run.match(shadow, start, concurrent=True)
            end = cut.start() if run is None else min(run.end(), stop)
            ids += self._encode_ordinary(text[start:end])
            start = end
        if len(ids) <= most:
            ids += self._encode_ordinary(text[start:stop])

    def _find_block(self, text: str, start: int) -> int | None:
        """Returns the start of the next aligned block of one kind, at or after ``start``."""
        fullmatch = self._block.fullmatch
        for position in range(start, len(text) - BLOCK + 1, BLOCK):
            if fullmatch(text, position, position + BLOCK):
                return position
        return None

    def _pieces(self, text: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields (begin, end) of each piece from ``start`` to the first that ends at or after ``stop``."""
        # A piece may be megabytes long: ``concurrent`` lets other threads run while it is matched.
        for match in self._piece.finditer(text, start, concurrent=True):
            yield match.span()
            if match.end() >= stop:
                return

    def _shadow(self, text: str) -> str:
        """Returns ``text``, or text of equal length that the regex package splits as tiktoken splits
        ``text``."""
        if text.isascii():
            return text
        chars: set[str] = set()
        for start in range(0, len(text), SLICE):
            chars.update(text[start : start + SLICE])
        for char in chars - self._known:
            # Assigned since Unicode 3.2, so of the same kind in every table in use.
            if unicodedata.ucd_3_2_0.category(char) == "Cn":
                self._compare(char)
            self._known.add(char)
        differing = {code: self._stand_ins[code] for code in map(ord, chars) if code in self._stand_ins}
        return text.translate(differing) if differing else text

    def _compare(self, char: str) -> None:
        """Finds out tiktoken's kind of ``char`` from how it splits ``char`` + "123" and ``char`` + "'s"."""

        def last_token(text: str) -> bytes:
            ids: list[int] = self._encode_ordinary(text)
            return self._token_bytes[ids[-1]]

        if last_token(f"{char}123") != b"123":  # digits are grouped by three, so the character is a digit
            theirs = "number"
        elif last_token(f"{char}'s") == b"s":  # the apostrophe belongs to the character's piece
            theirs = "symbol"
        else:
            theirs = "letter"
        if theirs != self._kind.match(char).lastgroup:
            self._stand_ins[ord(char)] = _STAND_INS[theirs]

    def _encode_windows(self, piece: bytes, most: int) -> list[int]:
        """Returns the ids of one long piece, or more than ``most`` of its first ones.

        Windows are joined where the next one begins with the expected token.
        """
        memo: dict[bytes, list[int]] = {}  # runs repeat: most windows were seen before
        out: list[int] = []
        start, size = 0, WINDOW
        ids: list[int] = self._encode_piece(piece[:size])
        while start + size < len(piece) and len(out) <= most:
            joined = self._join(piece, start + size, ids, memo)
            if joined is None:
                size *= 2
                first, ids = ids[0], self._encode_piece(piece[start : start + size])
                if start and ids[0] != first:  # the windows were joined at that token
                    whole: list[int] = self._encode_piece(piece)
                    return whole
                continue
            keep, start, following = joined
            out += ids[:keep]
            ids, size = following, WINDOW
        return out + ids

    def _join(
        self, piece: bytes, end: int, ids: list[int], memo: dict[bytes, list[int]]
    ) -> tuple[int, int, list[int]] | None:
        """Returns (number of ``ids`` to keep, start of the next window, its ids), or None if the windows
        cannot be joined.

        ``ids`` encode the bytes before ``end``. The last few are dropped, because later bytes may change
        them; if the next window begins with another token, more are dropped.
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
    """Replaces surrogate pairs by their character; a lone surrogate becomes U+FFFD, as in tiktoken."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
