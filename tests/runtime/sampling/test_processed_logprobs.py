"""``--logprobs-mode``: the distribution that a token was drawn from, with drafts and on several ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from chorale.kernels.cpu.sampler import CpuSampler
from chorale.kernels.ops import MakeSampler, SamplingInputs
from chorale.kernels.reference.sampling.sampling import ReferenceSampler
from chorale.kernels.reference.sampling.shared_sampling import make_shared_sampler
from chorale.model.config_writer import make_config
from chorale.parallel.rank import Rank
from chorale.parallel.shares import make_shares
from chorale.runtime.sampling.logprobs import LogprobTensors
from chorale.runtime.sampling.sampler import Sampler
from tests.parallel.ranks import on_ranks
from tests.runtime.sampling.slow_sampler import Case, probabilities, processed
from tests.runtime.sampling.test_sampler import UNDECIDED, V, random_cases, start_rows
from tests.support.engine.drafters import knowing
from tests.support.runtime import (
    CPU,
    Answer,
    make_engine,
    mixed_requests,
    request,
    run,
    sampling_batch,
    with_drafter,
)


class Kernels:
    """A back end that shares no code with the reference, as that of GPUs."""

    def __init__(self, *arguments: Any) -> None:
        self._inner = ReferenceSampler(*arguments)

    def __call__(self, logits: torch.Tensor, draws: SamplingInputs, *out: torch.Tensor) -> None:
        self._inner(logits, draws, *out)


def scored(sampler: Sampler, cases: list[Case], logits: torch.Tensor) -> list[LogprobTensors]:
    """Samples each case, and returns the log-probabilities of the whole vocabulary."""
    asking = [replaced(case, logprobs=V) for case in cases]
    positions = [len(case.prompt) + len(case.output) for case in cases]
    batch = sampling_batch(start_rows(asking), range(len(cases)), positions)
    tokens = sampler.sample(logits, batch)
    return [sampler.logprobs_at(row, logits, tokens, batch) for row in range(len(cases))]


def replaced(case: Case, **changes: Any) -> Case:
    spec = msgspec.structs.replace(case.spec, **changes)
    return Case(spec, case.prompt, case.output, case.eos, case.seed, case.forbidden)


@pytest.mark.parametrize("back_end", [ReferenceSampler, CpuSampler, Kernels])
def test_they_equal_the_slow_specification(back_end: MakeSampler) -> None:
    cases, logits = random_cases(150, 3)
    sampler = Sampler(CPU, V, cases[0].forbidden, back_end, mode="processed_logprobs")
    num_decided = num_removed = 0
    for row, found in enumerate(scored(sampler, cases, logits)):
        case, own = cases[row], logits[row].double().numpy()
        if case.spec.temperature == 0:  # neither temperature nor filters
            scores = processed(own, case)
            expected, margin = np.exp(scores - scores.max()), math.inf
            expected /= expected.sum()
        else:
            expected, margin = probabilities(own, case)
        if margin < UNDECIDED:
            continue
        num_decided += 1
        num_removed += int((expected == 0).sum())
        dense = torch.zeros(V).scatter_(0, found.top_ids[0], found.top_logprobs[0].exp())
        assert dense.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        assert (found.top_logprobs[0] == -math.inf).sum() == (expected == 0).sum()
        assert found.logprobs[0].exp() == pytest.approx(expected[int(found.token_ids[0])], abs=1e-5)
        assert found.ranks[0] == (expected > expected[int(found.token_ids[0])] * (1 + 1e-6)).sum() + 1
    assert num_decided > 130
    assert num_removed > 1000


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_not_normalised(mode: Any) -> None:
    cases, logits = random_cases(20, 5)
    cases = [replaced(case, temperature=0.5, logit_bias={}) for case in cases if not case.spec.min_tokens]
    logits = logits[: len(cases)]
    normal = Sampler(CPU, V, (), mode=mode.replace("logits", "logprobs"))
    for own, found, other in zip(
        logits,
        scored(Sampler(CPU, V, (), mode=mode), cases, logits),
        scored(normal, cases, logits),
        strict=True,
    ):
        kept = other.top_logprobs[0].isfinite()
        difference = (found.top_logprobs - other.top_logprobs)[0][kept]
        assert (difference - difference[0]).abs().max() < 1e-4
        if mode == "raw_logits":
            assert torch.equal(found.top_logprobs[0], own.sort(descending=True).values)


def test_the_drawn_token_is_never_removed() -> None:
    """A kernel may round a filter's threshold otherwise."""
    case = random_cases(1, 1)[0][0]
    case = replaced(case, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, logprobs=3, allowed_token_ids=None)
    logits = torch.arange(V, dtype=torch.float32).unsqueeze(0)
    batch = sampling_batch(start_rows([case]), [0], [len(case.prompt) + len(case.output)])
    sampler = Sampler(CPU, V, (), mode="processed_logprobs")
    found = sampler.logprobs_at(0, logits, torch.tensor([50]), batch)
    assert found.logprobs[0].isfinite()
    assert found.top_logprobs[0].isfinite().tolist() == [True, True, False]


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits"])
def test_ranks_give_the_same(mode: Any) -> None:
    cases, logits = random_cases(40, 8)

    def on_rank(rank: Rank | None) -> list[list[torch.Tensor]]:
        own = slice(None) if rank is None else slice(rank.share.vocabulary.start, rank.share.vocabulary.stop)

        def make(*arguments: Any, **options: Any) -> ReferenceSampler:
            if rank is None:
                return ReferenceSampler(*arguments, **options)
            return make_shared_sampler(rank, *arguments, **options)

        sampler = Sampler(CPU, V, (), make, rank=rank, mode=mode)
        asking = [replaced(case, logprobs=4) for case in cases]
        positions = [len(case.prompt) + len(case.output) for case in cases]
        batch = sampling_batch(start_rows(asking), range(len(cases)), positions)
        part = logits[:, own]
        tokens = sampler.sample(part, batch)
        return [list(sampler.logprobs_at(row, part, tokens, batch)) for row in range(len(cases))]

    expected = on_rank(None)
    sizes = make_config(layers=1, heads=4, kv_heads=2, experts=2, hidden=32, inter=128, vocab=V)
    shares = make_shares(sizes, 2)
    for found in on_ranks(shares, on_rank):
        for one, other in zip(found, expected, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert torch.allclose(mine.float(), theirs.float(), atol=1e-5)


def test_drafts_change_nothing(checkpoint: Path) -> None:
    core = make_engine(checkpoint, logprobs_mode="processed_logprobs")
    requests = [
        msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, logprobs=20))
        for each in mixed_requests()
    ]
    requests.append(request("few", [1, 2, 3], seed=1, max_tokens=30, top_k=5, logprobs=20))
    expected = run(core, requests)
    drafted = with_drafter(core, knowing(expected, most=4, wrong=0.2, vocab_size=core.limits.vocab_size))
    found = run(drafted, requests)
    assert drafted.stats().num_accepted_tokens > 20
    assert records(found) == records(expected)
    values = [value for record in expected["few"][0].logprobs for value in record.top_logprobs]
    assert values.count(-math.inf) == 30 * 15
    core.shutdown()


def records(answers: dict[str, list[Answer]]) -> dict[str, list[Any]]:
    return {
        name: [
            (record.token_id, pytest.approx(record.logprob, abs=1e-5))
            for each in some
            for record in each.logprobs
        ]
        for name, some in answers.items()
    }
