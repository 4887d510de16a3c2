"""Drafters for tests: always right, always wrong, and anything in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as TypingSequence
from typing import Any, Protocol

import numpy as np

from chorale.engine.drafts.planner import HostDrafter
from chorale.engine.sequence import NO_TOKENS, Sequence
from chorale.engine.types import IntArray

Future = Callable[[Sequence], list[int]]  # the whole output that a sequence will have


class Oracle(HostDrafter):
    """Knows the output. ``wrong``: probability that a token of a draft is wrong; ``most``: tokens of a draft,
    or their largest number, drawn for each draft, if it ``varies``."""

    def __init__(
        self,
        future: Future,
        *,
        most: int,
        wrong: float = 0.0,
        varies: bool = False,
        vocab_size: int = 2,
        seed: int = 0,
    ) -> None:
        self._future, self._most, self._wrong, self._varies = future, most, wrong, varies
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self.ended: list[Sequence] = []
        self.num_proposed = 0

    def propose(self, sequence: Sequence, most: int) -> IntArray:
        assert sequence not in self.ended
        assert most >= 1
        count = min(most, self._rng.randint(0, self._most) if self._varies else self._most)
        known = len(sequence.output)
        draft = self._future(sequence)[known : known + count]
        draft = [self._spoilt(token) for token in draft]
        self.num_proposed += len(draft)
        return np.array(draft, np.int32) if draft else NO_TOKENS

    def _spoilt(self, token: int) -> int:
        if self._rng.random() >= self._wrong:
            return token
        return (token + self._rng.randrange(1, self._vocab_size)) % self._vocab_size

    def end(self, sequence: Sequence) -> None:
        assert sequence not in self.ended
        self.ended.append(sequence)


class Answered(Protocol):
    token_ids: list[int]


def knowing(answers: Mapping[str, TypingSequence[Answered]], **options: Any) -> Oracle:
    """Returns an oracle that knows the answers of a run without drafts."""

    def future(sequence: Sequence) -> list[int]:
        return answers[sequence.request_id][sequence.index].token_ids

    return Oracle(future, **options)


class Nonsense(HostDrafter):
    """Drafts random tokens, as many as allowed, up to ``most``."""

    def __init__(self, vocab_size: int, most: int, seed: int = 0) -> None:
        self._vocab_size, self._most = vocab_size, most
        self._rng = np.random.default_rng(seed)

    def propose(self, sequence: Sequence, most: int) -> IntArray:
        return self._rng.integers(0, self._vocab_size, min(most, self._most), dtype=np.int32)

    def end(self, sequence: Sequence) -> None:
        return None


def restless(most: int, num_rows: int) -> tuple[tuple[int, int], ...]:
    """Returns ``EngineLimits.draft_tokens`` with a different number for each number of rows, often 0."""
    counts = np.random.default_rng(0).integers(-most, most + 1, num_rows)
    return tuple((rows, max(0, count)) for rows, count in enumerate(counts.tolist(), 1))
