"""The inputs of the model and the sampler in one step. Frozen; nothing is left to decide.

A row with a draft of K tokens has 1 + K consecutive samples: after its last token and after each draft token.
It keeps the samples up to and including the first that differs from the draft; the last kept sample becomes
the row's last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chorale.engine.types import NO_DRAFT, REJECTED, IntArray, StepPlan
from chorale.runtime.sampling.batch import SamplingBatch

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """The N samples of a plan; those of an entry are consecutive."""

    entries: Indices  # [N] entry of the plan
    offsets: Indices  # [N] number of draft tokens before the sample
    firsts: Indices  # [N] first sample of the entry
    drafts: IntArray | None  # [N] the draft token to compare the sample with, or NO_DRAFT; None: no drafts


def single_samples(entries: Indices) -> SampleLayout:
    """Return a layout of one sample for each entry."""
    return SampleLayout(entries, np.zeros(len(entries), np.int64), np.arange(len(entries)), None)


def sample_layout(plan: StepPlan, query_start: IntArray) -> SampleLayout:
    """Return the layout of a plan. ``query_start`` [R + 1]: index of each entry's first token in the step."""
    entries = np.flatnonzero(plan.samples)
    if plan.num_drafts is None:
        return single_samples(entries)
    num_drafts = plan.num_drafts[entries].astype(np.int64)
    counts = 1 + num_drafts
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.arange(len(firsts)) - firsts
    entries = np.repeat(entries, counts)
    left = np.repeat(num_drafts, counts) - offsets  # draft tokens after the sample
    following = query_start[1:][entries] - left
    drafts = np.where(left > 0, plan.token_ids[np.minimum(following, plan.num_tokens - 1)], NO_DRAFT)
    return SampleLayout(entries, offsets, firsts, drafts.astype(np.int32))


@dataclass(frozen=True, slots=True)
class DraftTensors:
    """The drafts on the device, by sample."""

    drafts: torch.Tensor  # [N] int64, NO_DRAFT after the last draft token
    firsts: torch.Tensor  # [N] int64
    # [N] bool: replaces the comparison in benchmarks (``profile`` in
    # kernels/reference/sampling/draft_steps.py).
    pretended: torch.Tensor | None = None

    def kept(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [N] bool: which of the samples ``tokens`` [N] int64 are kept. Never waits for the device."""
        differs = self._differs(tokens).long()
        num_before = differs.cumsum(0) - differs
        return num_before == num_before[self.firsts]

    def without_rejected(self, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return ``tokens`` with REJECTED for the samples that are not kept."""
        return torch.where(kept, tokens, REJECTED)

    def last_kept(self, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return [N] bool: the last kept sample of each row."""
        return kept & self._differs(tokens)

    def _differs(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.pretended is None:
            return tokens != self.drafts
        return ~self.pretended | (self.drafts == NO_DRAFT)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Request for log-probabilities of ``targets``, given the tokens beginning at ``first``, for
    ``entry``."""

    entry: int
    first: int  # index of the first token in the step
    targets: torch.Tensor  # [P] int64: the next prompt token at each of P tokens
    num_top: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of a step after its forward pass."""

    logits_index: torch.Tensor  # [N] int64: the tokens after which to sample, in order
    sampling: SamplingBatch
    layout: SampleLayout
    drafts: DraftTensors | None  # None: no row has a draft
    prompt: tuple[PromptLogprobs, ...]
