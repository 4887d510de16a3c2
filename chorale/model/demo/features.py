"""Features of every token of the vocabulary, computed from its bytes: the fixed matrix R of the demo model.

The demo's embedding is ``R W`` and its unembedding ``R V`` (plus small corrections), so 201,088 rows cost a
few hundred kilobytes on disk. R depends on the vocabulary alone: integer hashes, no random number generator,
so that every machine computes the same bits.

A token's row contains its identity (a hash of its letters without case and without the leading space or sign,
and a weaker hash of its exact bytes), how it is written (leading character, case, kind), its first and last
letters, its pairs of letters, and each digit of numbers with up to three digits. So " weather", "_weather"
and "Weather" are similar, and a model that learned to copy or to add with some tokens can do it with tokens
it never saw. The row also contains the spelling of a word in its other form: " disposal" is one token, but
after a quotation mark it is "dis" + "posal", so its row holds the identities of those two. Last come the
first twelve letters by position, so that words outside the training data can be spelt.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

MAX_PIECES = 3  # tokens of a word in its other form that are kept
_MAX_BYTES = 16  # longer words are rare and the most expensive
CORE_DIMS = 192  # identity without space and case
EXACT_DIMS = 64  # identity of the exact bytes
PAIR_DIMS = 64  # bag of letter pairs
LETTER_DIMS = 32  # for the first letter, and again for the last
KIND_DIMS = 18
DIGIT_DIMS = 34  # 3 positions x 10 digits, and the number of digits (0 to 3)
PIECE_DIMS = 64  # identity of each piece of the other form: the first dimensions of its core
_NUM_BASIC = CORE_DIMS + EXACT_DIMS + PAIR_DIMS + 2 * LETTER_DIMS + KIND_DIMS + DIGIT_DIMS  # 436
_NUM_COUNTS = MAX_PIECES + 1  # number of pieces of the other form (0, 1, ...)
_NUM_UNSPELT = _NUM_BASIC + MAX_PIECES * PIECE_DIMS + _NUM_COUNTS  # 632
NUM_LETTERS = 12  # leading letters that are encoded by position
POSITION_DIMS = 12  # of the code of one letter
NUM_FEATURES = _NUM_UNSPELT + NUM_LETTERS * POSITION_DIMS  # 776

_NAMED_SIGNS = frozenset((" ", "_", "-", ".", '"', "'", "("))
_SEED = 0x43484F52414C45  # "CHORALE"
_M1, _M2, _GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Parts:
    """The features in parts: those shared by tokens of the same core, the token's own, and its spelling.

    ``core_ids[v]`` is the row of ``of_core`` for token ``v``. ``columns_*``: the columns of R that the parts
    fill: R[v, columns_of_core] = of_core[core_ids[v]], R[v, columns_own] = own[v], and for piece k of the
    other form R[v, columns_of_piece[k]] = of_piece[piece_ids[k, v]] (its last row is zero).
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
    """Return R in parts: a product with the parts costs less than one with R."""
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
        _position_features(cores),
    ]
    forms = other_forms(token_bytes)
    counts = np.eye(_NUM_COUNTS, dtype=np.float32)[(forms >= 0).sum(axis=1)] * np.float32(0.2)
    own = [_signs(exact_keys, EXACT_DIMS) * np.float32(0.35), _kind_features(texts), counts]
    # A piece's identity has the same bits as its core's, so that one linear map turns "spelt with" into "is".
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
    """Return a token's letters and digits without case and surrounding signs; without any, the token."""
    start, end = 0, len(text)
    while start < end and not text[start].isalnum():
        start += 1
    while end > start and not text[end - 1].isalnum():
        end -= 1
    return text[start:end].lower() or text


def _signs(keys: npt.NDArray[np.uint64], num_dims: int) -> FloatArray:
    """Return one vector of +-1/sqrt(num_dims) per key, from the bits of a splitmix64 stream."""
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
    """Return [N, PAIR_DIMS + 2 * LETTER_DIMS]: signed bag of letter pairs, first letter, last letter."""
    bounded = [f"^{core[:16]}$" for core in cores]
    sizes = np.fromiter(map(len, bounded), np.int64, len(bounded))
    characters = np.frombuffer("".join(bounded).encode("utf-32-le"), np.uint32).astype(np.int64)
    row = np.repeat(np.arange(len(bounded)), sizes)
    inside = row[:-1] == row[1:]  # pairs within one word
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
    """Return [N, KIND_DIMS] with values 0 or 0.35."""
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
    """Return [N, DIGIT_DIMS]: units, tens, hundreds and length of numbers with up to three digits."""
    digits = np.zeros((len(cores), DIGIT_DIMS), np.float32)
    for index, core in enumerate(cores):
        if len(core) <= 3 and core.isascii() and core.isdigit():
            for place, digit in enumerate(reversed(core)):
                digits[index, place * 10 + int(digit)] = 0.5
            digits[index, 30 + len(core)] = 0.5
        else:
            digits[index, 30] = 0.1
    return digits


def _position_features(cores: list[str]) -> FloatArray:
    """Return [N, NUM_LETTERS * POSITION_DIMS]: codes of an ASCII word's letters, by position."""
    codes = _signs(np.fromiter((_text_key(f"letter:{at}") for at in range(27)), np.uint64, 27), POSITION_DIMS)
    # The last row means no letter.
    codes = np.concatenate((codes * np.float32(0.3), np.zeros((1, POSITION_DIMS), np.float32)))
    which = np.full((len(cores), NUM_LETTERS), 27, np.int64)
    for index, core in enumerate(cores):
        if core.isascii() and core.isalpha():
            text = core[:NUM_LETTERS].encode()
            which[index, : len(text)] = np.frombuffer(text, np.uint8) - ord("a")
            which[index, len(text) : len(text) + 1] = 26
    return codes[which].reshape(len(cores), NUM_LETTERS * POSITION_DIMS)


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
