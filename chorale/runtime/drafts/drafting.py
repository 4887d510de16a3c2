"""Drafting: what a worker has for steps with drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorale.engine.types import StepPlan
from chorale.kernels.ops import ForwardBatch
from chorale.runtime.drafts.head_runner import HeadRunner
from chorale.runtime.drafts.launched import LaunchedHead, follow_device, has_device_drafts, pretend
from chorale.runtime.drafts.rows import DraftRows
from chorale.runtime.drafts.verify_graphs import VerifyGraphRunner
from chorale.runtime.steps.batch import StepBatch


@dataclass(frozen=True, slots=True)
class Drafting:
    """``head``: None if drafts come with the plans. ``graphs``: None if every step is launched."""

    rows: DraftRows
    head: HeadRunner | None
    launched: LaunchedHead | None  # of the head
    graphs: VerifyGraphRunner | None
    profile: torch.Tensor | None = None  # see ``Ops.accept``

    def start(self, plan: StepPlan) -> None:
        """Set up the rows that start."""
        self.rows.start(plan.starts)

    def settled(self, plan: StepPlan, step: StepBatch, batch: ForwardBatch | None) -> StepBatch:
        """Return the step with what the host does not know, and with the profile."""
        if step.drafts is None:
            return step
        if batch is not None and has_device_drafts(plan):
            step = follow_device(step, batch, self.rows.state)
        return step if self.profile is None else pretend(step, self.profile)

    def run_head(
        self, plan: StepPlan, step: StepBatch, batch: ForwardBatch, aux: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Run the head after a launched step (``LaunchedHead.run``). Returns the drafts, None if it makes
        none."""
        assert self.launched is not None
        made = self.launched.run(plan, step, batch, aux, tokens)
        return made if plan.num_made > 0 else None
