"""What a step keeps of its samples. That drafts change no token: ``test_draft_properties.py``."""

from __future__ import annotations

import numpy as np
import torch

from chorale.engine.types import ALL_FORBIDDEN, NO_DRAFT, REJECTED, IntArray, StepPlan
from chorale.runtime.sampling.sampler import FORBIDDEN, NO_TOKEN
from chorale.runtime.steps.batch import DraftTensors, sample_layout
from chorale.runtime.steps.buffers import query_starts
from chorale.runtime.steps.results import BAD_LOGITS, make_result


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def test_a_row_keeps_its_samples_up_to_the_first_that_differs() -> None:
    """Drafts of two tokens and of one, a chunk that does not sample, and a row without a draft."""
    plan = StepPlan(
        step_id=0,
        starts=(),
        rows=ints(0, 1, 2, 3),
        num_computed=ints(8, 8, 0, 8),
        num_new=ints(3, 2, 3, 1),
        samples=np.array([True, True, False, True]),
        token_ids=ints(9, 5, 6, 9, 7, 1, 1, 1, 9),
        appends=ints(),
        num_drafts=ints(2, 1, 0, 0),
    )
    layout = sample_layout(plan, query_starts(plan))
    assert layout.entries.tolist() == [0, 0, 0, 1, 1, 3]
    assert layout.drafts is not None
    assert layout.drafts.tolist() == [5, 6, NO_DRAFT, 7, NO_DRAFT, NO_DRAFT]
    drafts = DraftTensors(torch.from_numpy(layout.drafts).long(), torch.from_numpy(layout.firsts))
    tokens = torch.tensor([5, 4, 3, 7, FORBIDDEN, NO_TOKEN])
    kept = drafts.kept(tokens)
    assert kept.tolist() == [True, True, False, True, True, True]
    assert drafts.last_kept(tokens, kept).tolist() == [False, True, False, False, True, True]
    downloaded = drafts.without_rejected(tokens, kept)
    assert downloaded.tolist() == [5, 4, REJECTED, 7, FORBIDDEN, NO_TOKEN]
    result = make_result(plan, layout, [], [], [downloaded.numpy()])
    assert result.num_sampled.tolist() == [2, 1, 0, 0]
    assert result.token_ids.tolist() == [[5, 4, -1], [7, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert (result.errors, result.forbidden) == ({1: ALL_FORBIDDEN, 3: BAD_LOGITS}, {1})
