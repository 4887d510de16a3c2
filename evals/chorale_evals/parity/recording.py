"""Recording: one server's scores of the texts, in a file for later comparisons.

The file is JSON; arrays are base64 of their compressed bytes, so that 100,000 tokens take a few megabytes. It
contains the texts themselves, because a later version of Chorale may make different ones.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from chorale.errors import ConfigError
from chorale.machine.folders import write_whole
from chorale_evals.parity.texts import Text

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
FORMAT: Literal["chorale-parity-1"] = "chorale-parity-1"
MOST_BYTES = 2**31  # largest decompressed array; real ones are far smaller


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


class _ReadingInFile(msgspec.Struct):
    name: str
    kind: str
    token_ids: np.ndarray
    alone: Scores
    greedy: tuple[int, ...]
    greedy_scores: Scores
    continuation: tuple[int, ...]
    again: Scores

    @classmethod
    def of(cls, one: Reading) -> _ReadingInFile:
        ids = np.array(one.text.token_ids, np.int64)
        scores = (one.alone, one.greedy, one.greedy_scores, one.continuation, one.again)
        return cls(one.text.name, one.text.kind, ids, *scores)

    def reading(self) -> Reading:
        ids = tuple(self.token_ids.tolist())
        text = Text(self.name, self.kind, len(ids), ids)
        return Reading(text, self.alone, self.greedy, self.greedy_scores, self.continuation, self.again)


class _File(msgspec.Struct):
    readings: list[_ReadingInFile]
    top_k: int
    about: dict[str, Any]
    format: Literal["chorale-parity-1"] = FORMAT


def save(recording: Recording, path: Path) -> None:
    readings = [_ReadingInFile.of(one) for one in recording.readings]
    data = msgspec.json.encode(_File(readings, recording.top_k, recording.about), enc_hook=_pack)
    write_whole(path, data.decode())


def load(path: Path) -> Recording:
    """Reads a recording. Raises ``ConfigError`` if the file is not one."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File, dec_hook=lambda _, data: _unpack(data))
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise ConfigError(f"{path}: not a recording of chorale eval parity record ({error})") from None
    return Recording(tuple(one.reading() for one in found.readings), found.top_k, found.about)


def _pack(array: npt.NDArray[Any]) -> dict[str, Any]:
    kind = "<f4" if array.dtype.kind == "f" else "<i4"
    packed = zlib.compress(np.ascontiguousarray(array, kind).tobytes(), 6)
    return {"dtype": kind, "shape": list(array.shape), "data": base64.b64encode(packed).decode()}


def _unpack(data: dict[str, Any]) -> npt.NDArray[Any]:
    dtype, shape = data["dtype"], tuple(map(int, data["shape"]))
    if dtype not in ("<f4", "<i4") or any(size < 0 for size in shape):
        raise ValueError("an array has an unknown dtype or shape")
    expected = 4 * int(np.prod(shape, dtype=object))
    if expected > MOST_BYTES:
        raise ValueError("an array is too large")
    raw = zlib.decompressobj().decompress(base64.b64decode(data["data"]), expected + 1)
    flat = np.frombuffer(raw, dtype).reshape(shape)
    return flat.astype(np.float32 if dtype == "<f4" else np.int64)
