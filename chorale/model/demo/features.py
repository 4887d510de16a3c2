"""Features of every token of the vocabulary, computed from its bytes: the fixed matrix R of the demo model.

The demo's embedding is ``R W`` and its unembedding ``R V`` (plus small corrections), so 201,088 rows cost a
few hundred kilobytes on disk. R is a function of the vocabulary and nothing else: integer hashes, no random
number generator, so that every machine makes the same bits.

What a token's row says: who it is (a hash of its letters without case and without the space or sign in
front, and a weaker one of its exact bytes), how it is written (what stands in front, case, kind), its first
and last letters, the pairs of letters in it, and, for numbers of up to three digits, each digit by place. So
" weather", "_weather" and "Weather" are neighbours, and a model that learned to copy or to add with some
tokens can do it with tokens it never saw. And how a word is spelt in its other form: " disposal" is one
token, but after a quotation mark it is "dis" + "posal", so its row holds the identities of those two. Last,
which letter is the first, the second, and so on to the twelfth: a word that training never saw can be spelt.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chorale.model.demo.spelling import MAX_PIECES, other_forms

FloatArray = npt.NDArray[np.float32]

CORE_DIMS = 192  # identity without space and case
EXACT_DIMS = 64  # identity of the exact bytes
PAIR_DIMS = 64  # bag of letter pairs
LETTER_DIMS = 32  # each of: first letter, last letter
KIND_DIMS = 18
DIGIT_DIMS = 34  # 3 places x 10 digits, and how many places (none, 1, 2, 3)
PIECE_DIMS = 64  # identity of each piece of the other form: the first dimensions of its core's
_NUM_BASIC = CORE_DIMS + EXACT_DIMS + PAIR_DIMS + 2 * LETTER_DIMS + KIND_DIMS + DIGIT_DIMS  # 436
_NUM_COUNTS = MAX_PIECES + 1  # how many pieces the other form has (0, 1, ...)
_NUM_UNSPELT = _NUM_BASIC + MAX_PIECES * PIECE_DIMS + _NUM_COUNTS  # 632
PLACES = 12  # letters whose place is encoded
PLACE_DIMS = 12  # of the code of a letter at its place
NUM_FEATURES = _NUM_UNSPELT + PLACES * PLACE_DIMS  # 776

_NAMED_SIGNS = frozenset((" ", "_", "-", ".", '"', "'", "("))
_SEED = 0x43484F52414C45  # "CHORALE"
_M1, _M2, _GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Parts:
    """The features in parts: what a token shares with all of the same core, what is its own, its spelling.

    ``core_ids[v]`` is the row of ``of_core`` that token ``v`` has. ``columns_*``: the columns of R that the
    parts fill: R[v, columns_of_core] = of_core[core_ids[v]], R[v, columns_own] = own[v], and for piece k of
    the other form R[v, columns_of_piece[k]] = of_piece[piece_ids[k, v]] (its last row is zero).
    """

    of_core: FloatArray  # [number of cores, columns]
    own: FloatArray  # [V, columns]
    core_ids: npt.NDArray[np.int64]  # [V]
    columns_of_core: npt.NDArray[np.int64]
    columns_own: npt.NDArray[np.int64]
    of_piece: FloatArray  # [number of cores that occur in spellings + 1, PIECE_DIMS]
    piece_ids: npt.NDArray[np.int64]  # [MAX_PIECES, V]
    columns_of_piece: npt.NDArray[np.int64]  # [MAX_PIECES, PIECE_DIMS]


def feature_parts(token_bytes: list[bytes]) -> Parts:
    """R before it is spread out: a product with the parts costs less than one with R."""
    texts = [token.decode("utf-8", "replace") for token in token_bytes]
    order: dict[str, int] = {}
    core_ids = np.fromiter((order.setdefault(_core(t), len(order)) for t in texts), np.int64, len(texts))
    cores = list(order)
    core_keys = np.fromiter(map(_text_key, cores), np.uint64, len(cores))
    exact_keys = np.fromiter(map(_bytes_key, token_bytes), np.uint64, len(token_bytes))
    of_core = [
        _signs(core_keys, CORE_DIMS) * np.float32(0.8),
        _letter_features(cores),
        _digit_features(cores),
        _place_features(cores),
    ]
    forms = other_forms(token_bytes)
    counts = np.eye(_NUM_COUNTS, dtype=np.float32)[(forms >= 0).sum(axis=1)] * np.float32(0.2)
    own = [_signs(exact_keys, EXACT_DIMS) * np.float32(0.35), _kind_features(texts), counts]
    # A piece's identity has the very bits of its core's, so that one linear map turns "spelt with" into "is".
    used, piece_ids = np.unique(np.where(forms < 0, len(cores), core_ids[forms]), return_inverse=True)
    codes = _signs(core_keys[used[used < len(cores)]], PIECE_DIMS) * np.float32(0.5)
    of_piece = np.concatenate((codes, np.zeros((1, PIECE_DIMS), np.float32)))
    at = np.cumsum((0, CORE_DIMS, EXACT_DIMS, PAIR_DIMS + 2 * LETTER_DIMS, KIND_DIMS, DIGIT_DIMS))
    core, exact, letters, kind, digits = (np.arange(a, b) for a, b in itertools.pairwise(at))
    pieces = np.arange(_NUM_BASIC, _NUM_BASIC + MAX_PIECES * PIECE_DIMS)
    return Parts(
        np.concatenate(of_core, axis=1),
        np.concatenate(own, axis=1),
        core_ids,
        np.concatenate((core, letters, digits, np.arange(_NUM_UNSPELT, NUM_FEATURES))),
        np.concatenate((exact, kind, np.arange(_NUM_UNSPELT - _NUM_COUNTS, _NUM_UNSPELT))),
        of_piece,
        piece_ids.reshape(forms.shape).T.copy(),
        pieces.reshape(MAX_PIECES, PIECE_DIMS),
    )


def _core(text: str) -> str:
    """The letters and digits of a token, without case and without signs around them; else the token."""
    start, end = 0, len(text)
    while start < end and not text[start].isalnum():
        start += 1
    while end > start and not text[end - 1].isalnum():
        end -= 1
    return text[start:end].lower() or text


def _signs(keys: npt.NDArray[np.uint64], num_dims: int) -> FloatArray:
    """One vector of +-1/sqrt(num_dims) per key: the bits of a splitmix64 stream."""
    num_words = (num_dims + 63) // 64
    steps = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    words = _mix(keys[:, None] + steps[None, :])
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), axis=1, bitorder="little")[:, :num_dims]
    return (bits.astype(np.float32) * 2 - 1) / np.float32(np.sqrt(num_dims))


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser, modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_M1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_M2)
    return z ^ (z >> np.uint64(31))


def _bytes_key(data: bytes) -> int:
    """FNV-1a, 64 bits."""
    key = 0xCBF29CE484222325 ^ _SEED
    for byte in data:
        key = ((key ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return key


def _text_key(text: str) -> int:
    return _bytes_key(b"core:" + text.encode("utf-8", "replace"))


def _letter_features(cores: list[str]) -> FloatArray:
    """[N, PAIR_DIMS + 2 * LETTER_DIMS]: signed bag of letter pairs, first letter, last letter."""
    bounded = [f"^{core[:16]}$" for core in cores]
    sizes = np.fromiter(map(len, bounded), np.int64, len(bounded))
    characters = np.frombuffer("".join(bounded).encode("utf-32-le"), np.uint32).astype(np.int64)
    row = np.repeat(np.arange(len(bounded)), sizes)
    inside = row[:-1] == row[1:]  # pairs that do not cross from one word into the next
    pairs = (characters[:-1] << 21 | characters[1:])[inside]
    distinct, which = np.unique(pairs, return_inverse=True)
    made = [_pair(chr(pair >> 21) + chr(pair & 0x1FFFFF)) for pair in distinct.tolist()]
    column = np.asarray([column for column, _ in made])[which]
    sign = np.asarray([sign for _, sign in made])[which]
    row = row[:-1][inside]
    values = sign * (0.5 / np.sqrt(sizes - 1))[row]
    sums = np.bincount(row * PAIR_DIMS + column, values, len(cores) * PAIR_DIMS)
    bag = sums.astype(np.float32).reshape(len(cores), PAIR_DIMS)
    letter_of = functools.cache(_letter)
    first = np.fromiter((letter_of(core[:1]) for core in cores), np.int64, len(cores))
    last = np.fromiter((letter_of(core[-1:]) for core in cores), np.int64, len(cores))
    eye = np.eye(LETTER_DIMS, dtype=np.float32) * np.float32(0.3)
    return np.concatenate([bag, eye[first], eye[last]], axis=1)


def _letter(character: str) -> int:
    if "a" <= character <= "z":
        return ord(character) - ord("a")
    if character.isdigit():
        return 26
    return 27 + (ord(character[0]) % 5 if character else 0)


def _pair(pair: str) -> tuple[int, float]:
    key = _text_key("pair:" + pair)
    return key % PAIR_DIMS, 1.0 if (key >> 32) & 1 else -1.0


def _kind_features(texts: list[str]) -> FloatArray:
    """[N, KIND_DIMS] of 0 or 0.35."""
    flags = bytearray()
    for text in texts:
        core = text.strip(" ")
        first, last = text[:1], text[-1:]
        is_plain = core.isalnum()
        has_plain = is_plain or any(map(str.isalnum, core))
        is_long = len(core) > 1
        flags += bytes(
            (
                first == " ",
                first == "_",
                first == "-",
                first == ".",
                first == '"' or first == "'" or first == "(",
                not first.isalnum() and first not in _NAMED_SIGNS,
                is_long and not last.isalnum(),
                core.isalpha() and core.islower(),
                core.istitle(),
                is_long and core.isupper(),
                core.isdigit(),
                is_plain,
                not has_plain,
                "\n" in text,
                text.isspace(),
                core.isascii(),
                len(core) > 6,
                has_plain and not is_plain,
            )
        )
    kinds = np.frombuffer(flags, np.uint8).reshape(len(texts), KIND_DIMS)
    return kinds.astype(np.float32) * np.float32(0.35)


def _digit_features(cores: list[str]) -> FloatArray:
    """[N, DIGIT_DIMS]: for numbers of up to three digits, units, tens and hundreds and the length."""
    digits = np.zeros((len(cores), DIGIT_DIMS), np.float32)
    for index, core in enumerate(cores):
        if len(core) <= 3 and core.isascii() and core.isdigit():
            for place, digit in enumerate(reversed(core)):
                digits[index, place * 10 + int(digit)] = 0.5
            digits[index, 30 + len(core)] = 0.5
        else:
            digits[index, 30] = 0.1
    return digits


def _place_features(cores: list[str]) -> FloatArray:
    """[N, PLACES * PLACE_DIMS]: of ASCII words, the code of each letter and of the end by place."""
    codes = _signs(np.fromiter((_text_key(f"letter:{at}") for at in range(27)), np.uint64, 27), PLACE_DIMS)
    codes = np.concatenate(
        (codes * np.float32(0.3), np.zeros((1, PLACE_DIMS), np.float32))
    )  # the last: nothing there
    which = np.full((len(cores), PLACES), 27, np.int64)
    for index, core in enumerate(cores):
        if core.isascii() and core.isalpha():
            text = core[:PLACES].encode()
            which[index, : len(text)] = np.frombuffer(text, np.uint8) - ord("a")
            which[index, len(text) : len(text) + 1] = 26
    return codes[which].reshape(len(cores), PLACES * PLACE_DIMS)
