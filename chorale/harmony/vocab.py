"""The o200k_harmony vocabulary: vendored ranks, special tokens, and both directions of the mapping.

The ranks ship with the package, compressed, and their sha256 is checked at each load. Nothing is
downloaded or written. ``TIKTOKEN_ENCODINGS_BASE``, where set, names a folder whose ``o200k_base.tiktoken``
is read instead (and checked against the same hash), as other harmony tools do.

The model has 201,088 embedding rows, ids 0..201087. Ids from 199,998 on are special: nine have a meaning
(``SPECIAL_NAMES``), the others are named ``<|reserved_N|>`` and are never sampled. Ordinary text never
encodes to special ids.
"""

from __future__ import annotations

import binascii
import functools
import hashlib
import logging
import lzma
import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Final

from chorale.errors import ContextLengthError
from chorale.harmony.bpe import PIECE_PATTERN, LinearEncoder
from chorale.machine.folders import write_whole

VOCAB_SIZE: Final = 201088
NUM_RANKS: Final = 199998  # ordinary tokens: ids below this

STARTOFTEXT: Final = 199998
ENDOFTEXT: Final = 199999
RETURN: Final = 200002
CONSTRAIN: Final = 200003
CHANNEL: Final = 200005
START: Final = 200006
END: Final = 200007
MESSAGE: Final = 200008
CALL: Final = 200012

SPECIAL_NAMES: Final[dict[int, str]] = {
    STARTOFTEXT: "<|startoftext|>",
    ENDOFTEXT: "<|endoftext|>",
    RETURN: "<|return|>",
    CONSTRAIN: "<|constrain|>",
    CHANNEL: "<|channel|>",
    START: "<|start|>",
    END: "<|end|>",
    MESSAGE: "<|message|>",
    CALL: "<|call|>",
}
# Other spellings that raw prompts may use; never printed. This one is tiktoken's.
SPECIAL_ALIASES: Final[dict[str, int]] = {"<|endofprompt|>": 200018}

RANKS_FILE: Final = "o200k_base.tiktoken"
RANKS_SHA256: Final = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
logger = logging.getLogger(__name__)
RANKS_DIR_VARIABLE: Final = "TIKTOKEN_ENCODINGS_BASE"

_SPECIAL_PATTERN = r"<\|[a-z]++(?:_[0-9]{6})?\|>"


class VocabularyError(ValueError):
    """The ranks file is missing or is not the one this model was trained with."""


class TokenIdError(ValueError):
    """A token id outside 0..201087."""


class Vocabulary:
    """Immutable and safe to share between threads.

    ``encode`` is CPU work of about 30-80 ms per megabyte; servers call it in a thread beyond some size.
    """

    def __init__(self, ranks: bytes) -> None:
        """``ranks``: the contents of ``o200k_base.tiktoken``, already verified."""
        import regex  # type: ignore[import-untyped]  # comes with tiktoken

        fields = ranks.split()
        tokens = list(map(binascii.a2b_base64, fields[::2]))  # line number == rank in this file
        names = {special_name(i): i for i in range(NUM_RANKS, VOCAB_SIZE)}
        self._token_bytes: list[bytes] = tokens + [name.encode() for name in names]
        self._special_ids = names | SPECIAL_ALIASES
        self._special_pattern = regex.compile(_SPECIAL_PATTERN)

    @functools.cached_property
    def _encoder(self) -> LinearEncoder:
        """Created for the first text (0.2 s), since an engine process only needs the tokens' bytes."""
        import tiktoken  # imports no network code until asked to download

        tokens = self._token_bytes[:NUM_RANKS]
        encoding = tiktoken.Encoding(
            "o200k_harmony",
            pat_str=PIECE_PATTERN,
            mergeable_ranks=dict(zip(tokens, range(NUM_RANKS), strict=True)),
            special_tokens={special_name(i): i for i in range(NUM_RANKS, VOCAB_SIZE)},
        )
        return LinearEncoder(encoding._core_bpe, self._token_bytes)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Returns ids of ordinary text, never special ones (from 199,998 on).

        Equal to tiktoken's for every text, in linear time (see ``bpe``). A lone surrogate, which no UTF-8
        text can hold, is read as U+FFFD. Raises ``ContextLengthError`` for more than ``most`` ids, without
        computing many more.
        """
        return check_count(self._encoder.encode(text, most), most)

    def encode_with_special(self, text: str, most: int | None = None) -> list[int]:
        """Returns ids of a raw prompt, where ``<|start|>`` and other special tokens are recognized.

        For ``/v1/completions`` prompts and for developers only, never for chat content. Text that only
        resembles a special token stays text. ``most`` as in ``encode``.
        """
        ids: list[int] = []
        start = 0
        for match in self._special_pattern.finditer(text, concurrent=True):
            special = self._special_ids.get(match[0])
            if special is not None:
                ids += self.encode(text[start : match.start()], most)
                ids.append(special)
                check_count(ids, most)
                start = match.end()
        ids += self.encode(text[start:], most)
        return check_count(ids, most)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token; a special token's are its name. Raises ``TokenIdError``."""
        if not 0 <= token_id < VOCAB_SIZE:
            raise TokenIdError(f"token id {token_id} is outside 0..{VOCAB_SIZE - 1}")
        return self._token_bytes[token_id]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Raises ``TokenIdError``."""
        ids = list(ids)
        if ids and (min(ids) < 0 or max(ids) >= VOCAB_SIZE):
            bad = next(i for i in ids if not 0 <= i < VOCAB_SIZE)
            raise TokenIdError(f"token id {bad} is outside 0..{VOCAB_SIZE - 1}")
        return b"".join(map(self._token_bytes.__getitem__, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Returns text, invalid UTF-8 as U+FFFD, special tokens by name. Raises ``TokenIdError``."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Returns whether ordinary text can never contain this id (special, reserved)."""
        return NUM_RANKS <= token_id < VOCAB_SIZE


def check_count(ids: list[int], most: int | None) -> list[int]:
    """Returns ``ids``. Raises ``ContextLengthError`` if there are more than ``most``."""
    if most is not None and len(ids) > most:
        raise ContextLengthError(
            f"This model's maximum context length is exceeded: the prompt has more than {most} tokens"
        )
    return ids


def special_name(token_id: int) -> str:
    """Returns the printed name of a special or reserved id (199,998..201,087)."""
    return SPECIAL_NAMES.get(token_id) or f"<|reserved_{token_id}|>"


def load_vocabulary() -> Vocabulary:
    """Returns the vocabulary, which is loaded once (about 0.4 s). Raises ``VocabularyError``."""
    folder = os.environ.get(RANKS_DIR_VARIABLE) or None
    if (
        folder is not None and not (Path(folder) / RANKS_FILE).exists()
    ):  # guides set the variable before the download
        _say_missing(folder)
        folder = None
    return _load(folder)


@functools.lru_cache(maxsize=2)
def _say_missing(folder: str) -> None:
    logger.warning("%s: %s has no %s; using the built-in vocabulary", RANKS_DIR_VARIABLE, folder, RANKS_FILE)


@functools.lru_cache(maxsize=2)
def _load(folder: str | None) -> Vocabulary:
    return Vocabulary(read_ranks(folder))


def read_ranks(folder: str | None = None) -> bytes:
    """Returns the contents of the ranks file, the vendored one or that in ``folder``.

    Raises ``VocabularyError``.
    """
    if folder is None:
        vendored = resources.files("chorale").joinpath("data", f"{RANKS_FILE}.xz")
        ranks, origin = lzma.decompress(vendored.read_bytes()), "the vendored vocabulary"
    else:
        path = Path(folder) / RANKS_FILE
        try:
            ranks, origin = path.read_bytes(), str(path)
        except OSError as error:
            raise VocabularyError(f"{RANKS_DIR_VARIABLE} is set, but {path}: {error.strerror}") from error
    digest = hashlib.sha256(ranks).hexdigest()
    if digest != RANKS_SHA256:
        raise VocabularyError(f"{origin} has sha256 {digest}, expected {RANKS_SHA256}")
    return ranks


def export_vocabulary(folder: str | Path) -> Path:
    """Write ``o200k_base.tiktoken`` for other harmony tools into ``folder``, which is created if missing.

    They find the file if ``TIKTOKEN_ENCODINGS_BASE`` names the folder. Returns the file's path.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RANKS_FILE
    write_whole(path, read_ranks())
    return path
