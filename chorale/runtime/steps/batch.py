"""The inputs of the model and the sampler in one step: frozen, with all decisions made.

A row with a draft of K tokens has 1 + K consecutive places in the sampling batch: after its last token and
after each token of the draft. It keeps the samples up to the first that differs from the draft, that one
included; the last kept sample becomes the row's last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chorale.engine.types import NO_DRAFT, REJECTED, IntArray, StepPlan
from chorale.runtime.sampling.batch import SamplingBatch

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledPlaces:
    """The N places at which a plan samples; those of an entry are consecutive."""

    entries: Places  # [N] entry of the plan
    offsets: Places  # [N] draft tokens before the sample
    firsts: Places  # [N] first place of the entry
    drafts: IntArray | None  # [N] the draft token that the sample is compared with, NO_DRAFT; None: no drafts


def single_places(entries: Places) -> SampledPlaces:
    """One place for each of the entries."""
    return SampledPlaces(entries, np.zeros(len(entries), np.int64), np.arange(len(entries)), None)


def sampled_places(plan: StepPlan, query_start: IntArray) -> SampledPlaces:
    """``query_start`` [R + 1]: where each entry's tokens begin in the step."""
    entries = np.flatnonzero(plan.samples)
    if plan.num_drafts is None:
        return single_places(entries)
    num_drafts = plan.num_drafts[entries].astype(np.int64)
    counts = 1 + num_drafts
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.arange(len(firsts)) - firsts
    entries = np.repeat(entries, counts)
    left = np.repeat(num_drafts, counts) - offsets  # draft tokens from here on
    following = query_start[1:][entries] - left
    drafts = np.where(left > 0, plan.token_ids[np.minimum(following, plan.num_tokens - 1)], NO_DRAFT)
    return SampledPlaces(entries, offsets, firsts, drafts.astype(np.int32))


@dataclass(frozen=True, slots=True)
class DraftTensors:
    """The drafts on the device, by place."""

    drafts: torch.Tensor  # [N] int64, NO_DRAFT where none is left
    firsts: torch.Tensor  # [N] int64
    # [N] bool: replaces the comparison in benchmarks (``profile`` in
    # kernels/reference/sampling/draft_steps.py).
    pretended: torch.Tensor | None = None

    def kept(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] bool for the samples ``tokens`` [N] int64. Never waits for the device."""
        differs = self._differs(tokens).long()
        num_before = differs.cumsum(0) - differs
        return num_before == num_before[self.firsts]

    def without_rejected(self, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """``tokens`` with REJECTED for those that are not kept."""
        return torch.where(kept, tokens, REJECTED)

    def last_kept(self, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """[N] bool: the last kept sample of each row."""
        return kept & self._differs(tokens)

    def _differs(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.pretended is None:
            return tokens != self.drafts
        return ~self.pretended | (self.drafts == NO_DRAFT)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Request for log-probabilities of ``targets``, given the tokens from ``first`` on; for entry
    ``entry``."""

    entry: int
    first: int  # place of the first token in the step
    targets: torch.Tensor  # [P] int64: the next prompt token at each of the P places
    num_top: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The parts of a step after its forward pass."""

    logits_index: torch.Tensor  # [N] int64: the tokens after which to sample, in order
    sampling: SamplingBatch
    places: SampledPlaces
    drafts: DraftTensors | None  # None: no row has one
    prompt: tuple[PromptLogprobs, ...]
