"""Makes a StepResult from the arrays that a step downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chorale.engine.types import ALL_FORBIDDEN, REJECTED, IntArray, StepPlan, StepResult, TokenLogprobs
from chorale.runtime.device import Arrays
from chorale.runtime.sampling.logprobs import LogprobTensors, to_records
from chorale.runtime.sampling.sampler import FORBIDDEN, NO_TOKEN
from chorale.runtime.steps.batch import SampleLayout

BAD_LOGITS = "the model gave no finite logits for this sequence"


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Enqueued log-probabilities of one entry."""

    entry: int
    tensors: LogprobTensors


def empty_result(plan: StepPlan) -> StepResult:
    """Make the result of a step without rows."""
    none: IntArray = np.zeros(0, np.int32)
    return StepResult(plan.step_id, none.reshape(0, 1), none)


def make_result(
    plan: StepPlan,
    layout: SampleLayout,
    wanted: list[PendingLogprobs],
    prompt: list[PendingLogprobs],
    arrays: Arrays,
    *,
    has_drafts: bool = False,
) -> StepResult:
    """Make a StepResult from the fetched arrays: tokens, tensors of ``wanted`` and ``prompt``, and with
    ``has_drafts`` the head's drafts for the entries that sample."""
    tokens, entries, num_sampled = arrays[0].astype(np.int32), layout.entries, plan.samples.astype(np.int32)
    if layout.drafts is not None:
        kept = tokens != REJECTED
        num_sampled = np.bincount(entries[kept], minlength=len(plan.rows)).astype(np.int32)
    token_ids = np.full((len(plan.rows), 1 + int(layout.offsets.max(initial=0))), NO_TOKEN, np.int32)
    token_ids[entries, layout.offsets] = np.maximum(tokens, NO_TOKEN)
    bad, forbidden = (entries[tokens == why].tolist() for why in (NO_TOKEN, FORBIDDEN))
    num_sampled[bad + forbidden] -= 1
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    width = len(LogprobTensors._fields)
    for number, part in enumerate(wanted + prompt):
        some = arrays[1 + number * width : 1 + (number + 1) * width]
        found = logprobs if number < len(wanted) else prompt_logprobs
        found.setdefault(part.entry, []).extend(to_records(some))
    if layout.drafts is not None:
        logprobs = {entry: found[: num_sampled[entry]] for entry, found in logprobs.items()}
    return StepResult(
        step_id=plan.step_id,
        token_ids=token_ids,
        num_sampled=num_sampled,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        drafts=_drafts_of(plan, arrays[-1]) if has_drafts else None,
        errors=dict.fromkeys(bad, BAD_LOGITS) | dict.fromkeys(forbidden, ALL_FORBIDDEN),
        forbidden=frozenset(forbidden),
    )


def _drafts_of(plan: StepPlan, made: npt.NDArray[Any]) -> IntArray:
    """Return [R, num_made] from ``made``, which has one row for each entry that samples."""
    assert plan.makes is not None
    drafts: IntArray = np.full((len(plan.rows), plan.num_made), NO_TOKEN, np.int32)
    drafts[plan.samples] = made
    drafts[~plan.makes] = NO_TOKEN
    return drafts
