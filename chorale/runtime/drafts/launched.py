"""Steps with drafts that are launched kernel by kernel: with prompts, or rows with their own sampling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from chorale.engine.types import DRAFT, NO_DRAFT, REJECTED, StepPlan
from chorale.kernels.draft_steps import DraftRowState
from chorale.kernels.ops import ForwardBatch
from chorale.kernels.reference.sampling.noise import position_keys
from chorale.runtime.device import Device
from chorale.runtime.drafts.head_runner import HeadRunner, ReadTokens
from chorale.runtime.steps.batch import StepBatch
from chorale.runtime.steps.buffers import query_starts
from chorale.runtime.steps.places import DraftTensors


def has_device_drafts(plan: StepPlan) -> bool:
    return plan.num_drafts is not None and bool((plan.token_ids <= DRAFT).any())


def follow_device(step: StepBatch, batch: ForwardBatch, state: DraftRowState) -> StepBatch:
    """Return the step with the drafts, noise and stop ids that follow from what only the device knows."""
    assert step.drafts is not None
    rows, index = step.sampling.row_index, step.logits_index
    positions = batch.attention.positions[index] + 1
    is_early = (positions < state.may_stop_at[rows])[:, None]
    sampling = replace(
        step.sampling,
        keys=position_keys(state.key_bases[rows], positions),
        early_stops=torch.where(is_early, state.stops[rows], -1),
    )
    following = batch.token_ids[(index + 1).clamp(max=len(batch.token_ids) - 1)]
    drafts = torch.where(step.drafts.drafts == NO_DRAFT, NO_DRAFT, following)
    return replace(step, sampling=sampling, drafts=DraftTensors(drafts, step.drafts.firsts))


def pretend(step: StepBatch, profile: torch.Tensor) -> StepBatch:
    """Return the step with ``profile`` [K] in place of what is equal (``Ops.accept``)."""
    drafts = step.drafts
    assert drafts is not None
    offsets = torch.arange(len(drafts.firsts), device=profile.device) - drafts.firsts
    words = step.sampling.keys[:, 1].long() & 0xFFFFFFFF
    chances = profile[offsets.clamp(max=len(profile) - 1)]
    return replace(step, drafts=replace(drafts, pretended=words < chances * 2.0**32))


class LaunchedHead:
    """Runs the head after a launched step."""

    def __init__(self, device: Device, runner: HeadRunner, state: DraftRowState) -> None:
        self._device, self._runner, self._state = device, runner, state

    def run(
        self, plan: StepPlan, step: StepBatch, batch: ForwardBatch, aux: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """``tokens`` [N]: the step's samples, REJECTED where they are not kept.

        Returns the drafts [R, num_made] of the R entries that sample, whatever they are for rows that get
        none.
        """
        assert plan.makes is not None
        assert plan.following is not None
        state, places = self._state, step.places
        entries = np.flatnonzero(plan.samples)
        known = np.flatnonzero(plan.following >= 0)
        rows = plan.rows[entries]
        spare_row = len(state.last_token) - 1
        parts = (
            np.cumsum(places.offsets == 0) - 1,  # [N] number of the place's entry among those that sample
            np.flatnonzero(places.offsets == 0),  # [R] its first place
            rows,
            np.where(plan.makes[entries], rows, spare_row),
            query_starts(plan)[1:][known] - 1,
            plan.following[known],
        )
        packed = self._device.upload(np.concatenate(parts, dtype=np.int32))
        owners, firsts, own, drafting, known_places, known_tokens = packed.split(
            [len(part) for part in parts]
        )
        following = batch.token_ids.roll(-1)
        following.index_copy_(0, known_places.long(), known_tokens.long())
        following.index_copy_(0, step.logits_index, tokens.clamp(min=0))
        num_kept = torch.zeros_like(firsts).index_add_(0, owners.long(), (tokens != REJECTED).int())
        last_place = step.logits_index[(firsts + num_kept - 1).long()]
        state.last_position.index_copy_(0, own.long(), batch.attention.positions[last_place] + 1)
        self._runner.run(ReadTokens(aux, following, batch.attention, last_place, drafting), plan.num_made)
        return state.drafts[: plan.num_made, own.long()].t()
