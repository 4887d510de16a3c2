"""Recording: one server's scores of the texts, in a file for later comparisons.

The file is an archive of NumPy arrays (``.npz``). Its entry "head" is JSON, which names the other entries. It
contains the texts themselves, because a later version of Chorale may make different ones.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from chorale.errors import ConfigError
from chorale.machine.folders import whole_file
from chorale_evals.parity.texts import Text

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
MOST_BYTES = 2**33  # largest sum of decompressed arrays; real ones are far smaller
# What a damaged or foreign file raises in zipfile and NumPy.
_UNREADABLE = (
    ValueError, LookupError, TypeError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of a sequence of n tokens. Missing ones are NaN, missing ids -1."""

    token: Floats  # [n]
    top: Floats  # [n, k], best first
    top_ids: Ints  # [n, k]


@dataclass(frozen=True, slots=True)
class Reading:
    """One text through one server.

    ``alone``: its tokens, scored in a request that had the server to itself. ``again``: the same in a crowd
    of other requests, with the continuation of the reference after the text. ``greedy`` and
    ``greedy_scores``: the server's own continuation at temperature 0.
    """

    text: Text
    alone: Scores
    greedy: tuple[int, ...]
    greedy_scores: Scores
    continuation: tuple[int, ...]  # the reference's; ``again`` scores the text, then these
    again: Scores


@dataclass(frozen=True, slots=True)
class Recording:
    """All readings of a server. ``about``: JSON that describes it (where, model, when)."""

    readings: tuple[Reading, ...]
    top_k: int
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.about.get("where", "?"))


class _Head(msgspec.Struct):
    recording: Recording
    format: Literal["chorale-parity-2"] = "chorale-parity-2"


def save(recording: Recording, path: Path) -> None:
    arrays: dict[str, Any] = {}

    def put(array: npt.NDArray[Any]) -> str:
        name = f"array_{len(arrays)}"
        arrays[name] = array
        return name

    head = msgspec.json.encode(_Head(recording), enc_hook=put)
    with whole_file(path) as file:
        np.savez_compressed(file, head=np.frombuffer(head, np.uint8), **arrays)


def load(path: Path) -> Recording:
    """Reads a recording. Raises ``ConfigError`` if the file is not one."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
                raise ValueError("it is too large")
        with np.load(path, allow_pickle=False) as arrays:
            head = arrays["head"].tobytes()
            return msgspec.json.decode(head, type=_Head, dec_hook=lambda _, name: arrays[name]).recording
    except _UNREADABLE as error:
        raise ConfigError(f"{path}: not a recording of chorale eval parity record ({error})") from None
