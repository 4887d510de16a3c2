"""Log-probabilities and tokens recorded from a running engine, to be checked after its end. Torch-free."""

from __future__ import annotations

from pathlib import Path

import msgspec

# Token ids of texts, with log-probabilities computed by transformers (``scripts/known_answers.py``). The last
# text is English prose.
KNOWN_ANSWERS = Path(__file__).with_name("demo_answers.json")


class Position(msgspec.Struct, frozen=True):
    """Log-probabilities of tokens at ``index``, given the tokens before it. The actual token comes first."""

    index: int
    token_ids: list[int]
    logprobs: list[float]


class Sequence(msgspec.Struct, frozen=True):
    """``tokens``: ``num_prompt`` tokens of the prompt, then those that the engine sampled greedily."""

    name: str
    tokens: list[int]
    num_prompt: int
    positions: list[Position]


class Draw(msgspec.Struct, frozen=True):
    """Tokens that were sampled with a seed. ``top_k``: 0 if all tokens could be sampled."""

    temperature: float
    seed: int
    top_k: int
    positions: list[Position]


class Recording(msgspec.Struct):
    sequences: list[Sequence] = []
    draws: list[Draw] = []
