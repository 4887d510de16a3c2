"""LogitsProcessors: a row's history grows with its sequence, and nothing of it is lost on the way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chorale.engine.types import RowStart, SamplingSpec
from chorale.runtime.sampling.logits_processors import FIRST_ROOM, LogitsProcessors

VOCAB, MAX_LEN = 50, 2000


@pytest.mark.parametrize("max_tokens", [None, 3 * FIRST_ROOM])
def test_penalties_after_the_history_has_grown(max_tokens: int | None) -> None:
    prompt = np.array([1, 2, 3], dtype=np.int32)
    spec = SamplingSpec(repetition_penalty=2.0, frequency_penalty=0.25, max_tokens=max_tokens)
    start = RowStart(0, prompt, len(prompt), spec, 0, ())
    processors = LogitsProcessors(start, VOCAB, MAX_LEN, torch.device("cpu"))
    output = [4 + n % 7 for n in range(3 * FIRST_ROOM)]
    for n, token in enumerate(output):
        processors.record(torch.tensor([token]), len(prompt) + n)
    logits = torch.ones(VOCAB)
    processors.apply(logits, len(prompt) + len(output))
    expected = torch.ones(VOCAB)
    for token in {*prompt.tolist(), *output}:
        expected[token] = 0.5 - 0.25 * output.count(token)
    assert torch.allclose(logits, expected)


def test_a_history_grows_with_its_sequence() -> None:
    start = RowStart(0, np.array([5], dtype=np.int32), 1, SamplingSpec(repetition_penalty=1.5), 0, ())
    processors = LogitsProcessors(start, VOCAB, 131_072, torch.device("cpu"))
    assert len(processors._history) <= 1 + FIRST_ROOM
