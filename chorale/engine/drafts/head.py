"""HeadDrafter: drafts that a head on the device makes at the end of each step.

The next step of a row verifies them there, so a plan need not know them: it is made while the step before
runs. Only rows whose grammar or logits processors follow every token need them on the host; they come with
the step's result, for which such a row waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from chorale.engine.sequence import Sequence

EARLY_STOPS = 8  # of ``kernels/ops.py``: stop ids that a step withholds without a logits processor


@dataclass(frozen=True, slots=True)
class HeadDrafter:
    """Drafts up to ``num_tokens`` tokens a row, unless more than ``most_rows`` rows run."""

    num_tokens: int
    most_rows: int

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence: there is nothing to forget."""


def follows_tokens(sequence: Sequence) -> bool:
    """Returns whether the host must know a draft to sample after it."""
    sampling = sequence.sampling
    return bool(
        sampling.grammar
        or sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or (sampling.min_tokens > 0 and len(sequence.stop_ids) > EARLY_STOPS)
    )
