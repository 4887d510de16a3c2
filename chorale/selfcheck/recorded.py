"""Log-probabilities that a running engine gave, to be compared once it has ended. Torch-free."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Position(msgspec.Struct, frozen=True):
    """Log-probabilities of some tokens at ``index``, given the tokens before it."""

    index: int
    token_ids: list[int]
    logprobs: list[float]


class Sequence(msgspec.Struct, frozen=True):
    """``tokens``: the prompt's ``num_prompt``, then those that the engine generated."""

    name: str
    tokens: list[int]
    num_prompt: int
    positions: list[Position]


class Recording(msgspec.Struct, frozen=True):
    sequences: list[Sequence]


def write_recording(path: Path, recording: Recording) -> None:
    path.write_bytes(msgspec.json.encode(recording))


def read_recording(path: Path) -> Recording:
    """Raises ``OSError`` if there is none."""
    return msgspec.json.decode(path.read_bytes(), type=Recording)
