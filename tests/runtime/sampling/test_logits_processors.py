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


@pytest.mark.parametrize("num_kept", [1, 2, 4])
def test_a_token_after_a_draft_is_sampled_as_if_the_draft_were_output(
    num_kept: int,
) -> None:
    """Foreseen, then recorded: of 4 samples after 3 tokens of a draft, the first ``num_kept`` are kept."""
    spec = SamplingSpec(
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        bad_words=((5, 6), (6,)),
        min_tokens=4,
    )
    start = RowStart(0, np.array([1, 2], dtype=np.int32), 2, spec, 0, (3, 7))

    def make() -> LogitsProcessors:
        return LogitsProcessors(start, 8, MAX_LEN, torch.device("cpu"))

    def scores(processors: LogitsProcessors, num_tokens: int) -> list[float]:
        logits = torch.linspace(-1, 2, 8)
        processors.apply(logits, num_tokens)
        found: list[float] = logits.tolist()
        return found

    known, draft, samples = [5, 4], [5, 4, 5], [5, 4, 5, 6]
    one, other = make(), make()
    for processors in (one, other):
        for position, token in enumerate(known, 2):
            processors.record(torch.tensor([token]), position)
    for position, token in enumerate(draft, 4):
        one.foresee(torch.tensor([token]), position)
    expected = []
    for position in range(4, 8):
        expected.append(scores(other, position))
        if position < 7:
            other.record(torch.tensor([draft[position - 4]]), position)
    assert [scores(one, position) for position in range(4, 8)] == expected
    again = make()
    for position, token in enumerate(known + samples[:num_kept], 2):
        again.record(torch.tensor([token]), position)
    for place, token in enumerate(samples):
        one.record(torch.tensor([token]), 4 + place, torch.tensor([place < num_kept]))
    assert scores(one, 4 + num_kept) == scores(again, 4 + num_kept)
