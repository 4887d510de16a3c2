"""Which samples of a step with drafts are kept, against the rule sample by sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chorale.engine.types import NO_DRAFT, REJECTED, BoolArray, IntArray, StepPlan
from chorale.runtime.sampling.sampler import FORBIDDEN
from chorale.runtime.steps.batch import DraftTensors, SampleLayout, sample_layout
from chorale.runtime.steps.buffers import query_starts
from chorale.runtime.steps.results import make_result

VOCAB = 4  # small, so that samples often equal the draft


def random_plan(rng: np.random.Generator) -> StepPlan:
    """Decodes, decodes with drafts, chunks that sample and chunks that do not."""
    num_rows = int(rng.integers(1, 8))
    drafts = np.sort(rng.integers(0, 5, num_rows)).astype(np.int32)
    num_new, samples = 1 + drafts, np.ones(num_rows, np.bool_)
    for _ in range(int(rng.integers(0, 3))):
        drafts = np.append(drafts, np.int32(0))
        num_new = np.append(num_new, rng.integers(1, 6))
        samples = np.append(samples, rng.random() < 0.5)
    num_new = num_new.astype(np.int32)
    none = np.zeros(0, np.int32)
    return StepPlan(
        step_id=0,
        starts=(),
        rows=np.arange(len(num_new), dtype=np.int32),
        num_computed=rng.integers(0, 50, len(num_new)).astype(np.int32),
        num_new=num_new,
        samples=samples,
        token_ids=rng.integers(0, VOCAB, int(num_new.sum())).astype(np.int32),
        append_row=none,
        append_group=none,
        append_index=none,
        append_block=none,
        num_drafts=drafts if rng.random() < 0.9 or drafts.any() else None,
    )


def check_result(plan: StepPlan, layout: SampleLayout, tokens: IntArray, kept: BoolArray) -> None:
    """What the worker makes of the samples: kept tokens, and an error where a kept sample is none."""
    downloaded = tokens if layout.drafts is None else np.where(kept, tokens, REJECTED)
    result = make_result(plan, layout, [], [], [downloaded])
    for entry in range(len(plan.rows)):
        own = tokens[(layout.entries == entry) & kept].tolist()
        good = [token for token in own if token >= 0]
        assert result.num_sampled[entry] == len(good)
        assert [token for token in result.token_ids[entry].tolist() if token >= 0] == good
        assert (entry in result.errors) == (good != own)
        assert (entry in result.forbidden) == (FORBIDDEN in own)


@pytest.mark.parametrize("seed", range(200))
def test_a_row_keeps_its_samples_up_to_the_first_that_differs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = random_plan(rng)
    starts = query_starts(plan)
    layout = sample_layout(plan, starts)
    tokens = rng.choice([-2, -1, *range(VOCAB), *range(VOCAB)], len(layout.entries)).astype(np.int32)
    kept, last, index = [], [], 0
    for entry in range(len(plan.rows)):
        if not plan.samples[entry]:
            continue
        count = 0 if plan.num_drafts is None else int(plan.num_drafts[entry])
        end = int(starts[entry + 1])
        draft = plan.token_ids[end - count : end].tolist()
        is_kept = True
        for offset, expected in enumerate([*draft, NO_DRAFT]):
            assert (layout.entries[index], layout.offsets[index]) == (entry, offset)
            if layout.drafts is not None:
                assert layout.drafts[index] == expected
            goes_on = is_kept and tokens[index] == expected
            kept.append(is_kept)
            last.append(is_kept and not goes_on)
            is_kept, index = goes_on, index + 1
    assert index == len(layout.entries)
    assert layout.drafts is not None or all(kept)
    check_result(plan, layout, tokens, np.array(kept))
    if layout.drafts is not None:
        tensors = DraftTensors(torch.from_numpy(layout.drafts).long(), torch.from_numpy(layout.firsts))
        on_device = tensors.kept(torch.from_numpy(tokens).long())
        assert on_device.tolist() == kept
        downloaded = tensors.without_rejected(torch.from_numpy(tokens).long(), on_device)
        assert downloaded.tolist() == np.where(kept, tokens, REJECTED).tolist()
        assert tensors.last_kept(torch.from_numpy(tokens).long(), on_device).tolist() == last
