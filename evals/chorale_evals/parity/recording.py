"""Recording: what one server said about the texts, in a file that a later comparison reads.

The file is JSON; arrays are base64 of their compressed bytes, so that 100,000 tokens take a few megabytes. It
holds the texts themselves: a later version of Chorale may make others.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chorale.errors import ConfigError
from chorale.machine.folders import write_whole
from chorale_evals.parity.texts import Text

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
FORMAT = "chorale-parity-1"
MOST_BYTES = 2**31  # of an array once it is expanded: no recording is near it


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of a sequence of n tokens. Those that a server did not give are NaN, ids -1."""

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
    continuation: tuple[int, ...]  # of the reference: ``again`` has the text's tokens, then these
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


def save(recording: Recording, path: Path) -> None:
    data = {
        "format": FORMAT,
        "about": recording.about,
        "top_k": recording.top_k,
        "readings": [_reading_to_json(one) for one in recording.readings],
    }
    write_whole(path, json.dumps(data))


def load(path: Path) -> Recording:
    """Raises ``ConfigError`` if the file is not a recording."""
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f'"format" is not {FORMAT}')
        readings = tuple(_reading_from_json(one) for one in data["readings"])
        return Recording(readings, int(data["top_k"]), dict(data["about"]))
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise ConfigError(f"{path}: not a recording of chorale eval parity record ({error})") from None


def _reading_to_json(one: Reading) -> dict[str, Any]:
    return {
        "name": one.text.name,
        "kind": one.text.kind,
        "token_ids": _pack(np.array(one.text.token_ids, np.int64)),
        "alone": _scores_to_json(one.alone),
        "greedy": list(one.greedy),
        "greedy_scores": _scores_to_json(one.greedy_scores),
        "continuation": list(one.continuation),
        "again": _scores_to_json(one.again),
    }


def _reading_from_json(data: dict[str, Any]) -> Reading:
    ids = tuple(_unpack(data["token_ids"]).tolist())
    return Reading(
        Text(str(data["name"]), str(data["kind"]), len(ids), ids),
        _scores_from_json(data["alone"]),
        tuple(map(int, data["greedy"])),
        _scores_from_json(data["greedy_scores"]),
        tuple(map(int, data["continuation"])),
        _scores_from_json(data["again"]),
    )


def _scores_to_json(scores: Scores) -> dict[str, Any]:
    return {"token": _pack(scores.token), "top": _pack(scores.top), "top_ids": _pack(scores.top_ids)}


def _scores_from_json(data: dict[str, Any]) -> Scores:
    return Scores(_unpack(data["token"]), _unpack(data["top"]), _unpack(data["top_ids"]))


def _pack(array: npt.NDArray[Any]) -> dict[str, Any]:
    kind = "<f4" if array.dtype.kind == "f" else "<i4"
    packed = zlib.compress(np.ascontiguousarray(array, kind).tobytes(), 6)
    return {"dtype": kind, "shape": list(array.shape), "data": base64.b64encode(packed).decode()}


def _unpack(data: dict[str, Any]) -> npt.NDArray[Any]:
    dtype, shape = data["dtype"], tuple(map(int, data["shape"]))
    if dtype not in ("<f4", "<i4") or any(size < 0 for size in shape):
        raise ValueError("an array of an unknown form")
    expected = 4 * int(np.prod(shape, dtype=object))
    if expected > MOST_BYTES:
        raise ValueError("an array is too large")
    raw = zlib.decompressobj().decompress(base64.b64decode(data["data"]), expected + 1)
    flat = np.frombuffer(raw, dtype).reshape(shape)
    return flat.astype(np.float32 if dtype == "<f4" else np.int64)
