"""The inputs of the model and the sampler in one step: frozen, with all decisions made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorale.runtime.sampling.batch import SamplingBatch
from chorale.runtime.steps.places import DraftTensors, SampledPlaces


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
