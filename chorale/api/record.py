"""The ``record`` of an answer (``include_record``): everything that ``chorale verify`` needs to repeat it."""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from chorale import harmony
from chorale.client.base import EngineInfo
from chorale.turns.record import Recorder
from chorale.turns.request import TurnRequest
from chorale.version import __version__


def record_field(info: EngineInfo, turns: Sequence[TurnRequest]) -> dict[str, Any]:
    """Returns ``{"record": ...}`` of turns that have ended, or {} if they were not recorded."""
    rounds: list[dict[str, Any]] = []
    first, is_recorded = 0, False
    for turn in turns:
        if turn.recorder is not None:
            is_recorded = True
            rounds += [each.object(first) for each in turn.recorder.rounds.values()]
        first += turn.sampling.n
    if not is_recorded:
        return {}
    version, _, commit = __version__.partition("+g")
    return {
        "record": {
            "object": "chorale.record",
            "model": {"name": info.model, "hash": info.model_hash},
            "template_hash": template_hash(),
            "build": {"version": version, "commit": commit or None},
            "kernels": {
                "ops": info.ops,
                "device": info.device,
                "dtype": info.dtype,
                "kv_cache_dtype": info.kv_cache_dtype,
                "logprobs_mode": info.logprobs_mode,
                "ranks": info.tensor_parallel_size,
                "batch_invariant": info.batch_invariant,
            },
            "seed": turns[0].sampling.seed,
            "rounds": rounds,
        }
    }


@functools.cache
def template_hash() -> str:
    """Returns a hash of the code that renders prompts, which takes the place of a chat template."""
    found = hashlib.sha256()
    for path in sorted(Path(harmony.__file__).parent.glob("*.py")):
        found.update(path.name.encode() + b"\n" + path.read_bytes())
    return found.hexdigest()


def recorded(turn: TurnRequest, is_asked: bool) -> TurnRequest:
    """Returns the turn; if asked, with a recorder of all but summaries, a seed and log-probabilities."""
    if not is_asked:
        return turn
    seed = secrets.randbits(53) if turn.sampling.seed is None else turn.sampling.seed  # exact in JSON
    sampling = msgspec.structs.replace(turn.sampling, seed=seed, logprobs=turn.sampling.logprobs or 0)
    return replace(turn, sampling=sampling, recorder=Recorder())
