"""Log-probabilities and tokens that a running engine gave, to be compared once it has ended. Torch-free."""

from __future__ import annotations

from pathlib import Path

import msgspec

from chorale.config.engine import EngineConfig

# Texts as token ids and their log-probabilities by transformers (``scripts/known_answers.py``). The last text
# is English prose.
KNOWN_ANSWERS = Path(__file__).with_name("demo_answers.json")


class Position(msgspec.Struct, frozen=True):
    """Log-probabilities of some tokens at ``index``, given the tokens before it; first that of its own."""

    index: int
    token_ids: list[int]
    logprobs: list[float]


class Sequence(msgspec.Struct, frozen=True):
    """``tokens``: the prompt's ``num_prompt``, then those that the engine chose greedily."""

    name: str
    tokens: list[int]
    num_prompt: int
    positions: list[Position]


class Draw(msgspec.Struct, frozen=True):
    """Tokens that were drawn by a seed. ``top_k``: 0 if all tokens could be."""

    temperature: float
    seed: int
    top_k: int
    positions: list[Position]


class Recording(msgspec.Struct):
    sequences: list[Sequence] = []
    draws: list[Draw] = []


class Order(msgspec.Struct, frozen=True):
    """The checks to run: their names, in order."""

    parent_pid: int
    config: EngineConfig
    checks: list[str]
    quick: bool
    recording: Recording
