"""The sampler against its slow specification, and what follows from each row being on its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from chorale.engine.types import SamplingSpec
from chorale.kernels.reference.sampling.filters import NEGLIGIBLE, filter_scores
from chorale.kernels.reference.sampling.noise import gumbel_noise, row_keys, token_steps, wrap_seed
from chorale.runtime.device import CpuDevice
from chorale.runtime.sampling.row_state import RowSamplingState
from chorale.runtime.sampling.sampler import FORBIDDEN, NO_TOKEN, RESERVED_IDS, Sampler
from tests.runtime.sampling.slow_sampler import Case, noise, probabilities, sample
from tests.support.runtime import CPU, row_start, sampling_batch

V = 97  # no multiple of any vector width
UNDECIDED = 1e-4  # nearer than this, float32 may differ from float64
SEVERAL_AT_ONCE = CpuDevice(CPU.hardware, sample_rows=7)


def random_spec(rng: np.random.Generator) -> SamplingSpec:
    """Each feature is on in about a third of the cases."""

    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.35 else default

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, V, count).tolist())

    return SamplingSpec(
        temperature=maybe(0.0, float(rng.uniform(0.2, 2.0))),
        top_p=maybe(float(rng.uniform(0.05, 0.99)), 1.0),
        top_k=maybe(int(rng.integers(1, V + 5)), 0),
        min_p=maybe(float(rng.uniform(0.01, 0.3)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe(dict(zip(ids(4), rng.uniform(-10, 10, 4).tolist(), strict=True)), {}),
        allowed_token_ids=maybe(ids(30), None),
        bad_words=maybe(tuple(ids(size) for size in (1, 1, 2, 2, 3)), ()),
        min_tokens=maybe(int(rng.integers(0, 8)), 0),
    )


def random_case(rng: np.random.Generator) -> Case:
    prompt = rng.integers(0, V, rng.integers(1, 12)).tolist()
    output = rng.integers(0, 6, rng.integers(0, 6)).tolist()  # few ids: penalties and bad words meet them
    return Case(random_spec(rng), prompt, output, (3, 5), int(rng.integers(0, 2**63)), (90, 96))


def start_rows(cases: list[Case], vocab: int = V) -> RowSamplingState:
    rows = RowSamplingState(len(cases), vocab, 64, torch.device("cpu"))
    for row, case in enumerate(cases):
        rows.start(row_start(row, case.spec, case.prompt, case.output, case.seed, tuple(case.eos)))
    return rows


def choose(cases: list[Case], logits: torch.Tensor, order: list[int], device: CpuDevice = CPU) -> list[int]:
    """Tokens of the rows in ``order``, sampled as one batch."""
    positions = [len(cases[row].prompt) + len(cases[row].output) for row in order]
    batch = sampling_batch(start_rows(cases, logits.shape[1]), order, positions)
    sampler = Sampler(device, logits.shape[1], forbidden=cases[0].forbidden)
    return sampler.sample(logits[order], batch).tolist()


def random_cases(count: int, seed: int) -> tuple[list[Case], torch.Tensor]:
    rng = np.random.default_rng(seed)
    cases = [random_case(rng) for _ in range(count)]
    logits = rng.normal(0, 3, (count, V)).astype(np.float32)
    return cases, torch.from_numpy(logits)


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_slow_specification(seed: int) -> None:
    cases, logits = random_cases(300, seed)
    before = logits.clone()
    chosen = choose(cases, logits, list(range(len(cases))))
    assert torch.equal(logits, before)
    num_decided = 0
    for row, case in enumerate(cases):
        expected, margin = sample(logits[row].double().numpy(), case)
        if margin > UNDECIDED:
            num_decided += 1
            assert chosen[row] == expected, (row, case)
    assert num_decided > 0.9 * len(cases)


@pytest.mark.parametrize("device", [CPU, SEVERAL_AT_ONCE])
def test_a_row_does_not_depend_on_the_batch(device: CpuDevice) -> None:
    cases, logits = random_cases(60, 11)
    alone = [choose(cases, logits, [row])[0] for row in range(len(cases))]
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(cases)).tolist()
        assert choose(cases, logits, order, device) == [alone[row] for row in order]


def test_noise_equals_its_integer_definition() -> None:
    seeds = [0, 1, 2**63 - 1, 12345678901234567, -5]
    positions = [0, 1, 131071, 77, 3]
    wrapped = np.array([wrap_seed(seed) for seed in seeds], np.uint64)
    keys = torch.from_numpy(row_keys(wrapped, np.array(positions, np.int64)))
    ours = gumbel_noise(keys, token_steps(201088, torch.device("cpu")))
    assert ours.isfinite().all()
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in (0, 1, 2, 1000, 199999, 201087):
            expected = noise(wrap_seed(seed), position, token)
            assert math.isclose(ours[row, token], expected, rel_tol=1e-5, abs_tol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(),
        SamplingSpec(temperature=0.6, top_p=0.9),
        SamplingSpec(temperature=1.4, top_k=8),
        SamplingSpec(temperature=1.0, min_p=0.1, top_p=0.95, top_k=15),
    ],
)
def test_frequencies_match_the_distribution(spec: SamplingSpec) -> None:
    """Chi-square over 20,000 positions of one fixed seed; the bound is 5 standard deviations."""
    vocab, draws = 24, 20000
    logits = np.random.default_rng(5).normal(0, 1.5, vocab).astype(np.float32)
    rows = RowSamplingState(1, vocab, 64, torch.device("cpu"))
    rows.start(row_start(0, spec, [1], seed=42))
    device = CpuDevice(CPU.hardware, sample_rows=5000)
    batch = sampling_batch(rows, [0] * draws, list(range(1, draws + 1)))
    tokens = Sampler(device, vocab).sample(torch.from_numpy(logits).expand(draws, vocab), batch)
    expected, _ = probabilities(logits.astype(np.float64), Case(spec, [1], [], (), 42))
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    wanted = expected[kept] * draws
    statistic = float((((counts[kept] - wanted) ** 2) / wanted).sum())
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_reserved_ids_are_never_sampled() -> None:
    """Not even when their logits are far above all others, biased, or the only ones allowed."""
    vocab = 201088
    logits = torch.zeros(3, vocab)
    logits[:, list(RESERVED_IDS)] = 50.0
    specs = [
        SamplingSpec(temperature=0.0, logit_bias={200013: 100.0}),
        SamplingSpec(top_p=0.5),
        SamplingSpec(allowed_token_ids=(199998, 200000, 201087)),
    ]
    cases = [Case(spec, [1], [], (), 7, RESERVED_IDS) for spec in specs]
    for _ in range(3):
        greedy, sampled, none = choose(cases, logits, [0, 1, 2])
        assert greedy not in RESERVED_IDS
        assert sampled not in RESERVED_IDS
        assert none == FORBIDDEN
    meant = {199999, 200002, 200003, 200005, 200006, 200007, 200008, 200012}
    assert set(range(199998, vocab)) - set(RESERVED_IDS) == meant


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, "all"])
@pytest.mark.parametrize("device", [CPU, SEVERAL_AT_ONCE])
def test_a_row_without_finite_logits_gives_no_token(bad: float | str, device: CpuDevice) -> None:
    cases, logits = random_cases(40, 3)
    good = choose(cases, logits, list(range(40)), device)
    for row in range(0, 40, 4):
        if bad == "all":
            logits[row] = -math.inf
        else:
            logits[row, 17] = bad
    found = choose(cases, logits, list(range(40)), device)
    for row in range(40):
        assert found[row] == (NO_TOKEN if row % 4 == 0 else good[row])


def test_penalties_counted_step_by_step_equal_those_counted_at_once() -> None:
    """As they are after a preemption, when the row starts again with all of its tokens."""
    rng = np.random.default_rng(9)
    spec = SamplingSpec(
        temperature=0.7,
        presence_penalty=0.8,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        bad_words=((1, 2), (3,)),
    )
    prompt, output = [4, 5, 4], []
    rows = RowSamplingState(2, V, 64, torch.device("cpu"))
    rows.start(row_start(0, spec, prompt, seed=8))
    sampler = Sampler(CPU, V, forbidden=())
    for _ in range(30):
        logits = torch.from_numpy(rng.normal(0, 1, (1, V)).astype(np.float32))
        position = len(prompt) + len(output)
        batch = sampling_batch(rows, [0], [position])
        token = sampler.sample(logits, batch)
        rows.start(row_start(1, spec, prompt, output, seed=8))
        assert sampler.sample(logits, sampling_batch(rows, [1], [position])).equal(token)
        batch.processors[0].record(token, position)
        output.append(int(token))


@pytest.mark.parametrize("k", [1, 3, 1023, 1024, 1025, 1027, 2998, 3000])
@pytest.mark.parametrize("is_tied", [False, True])
def test_top_k_finds_the_same_value_either_way(k: int, is_tied: bool) -> None:
    """Both sides of the bound where a partial sort gives way to bisection; ties with the k-th are kept."""
    scores = torch.from_numpy(np.random.default_rng(k).normal(0, 1, (2, 3000)).astype(np.float32))
    if is_tied:
        scores[:, :1500] = scores[:, 1500:]  # every value twice
    found, space = scores.clone(), (torch.empty_like(scores), torch.empty_like(scores))
    filter_scores(found, torch.tensor([float(k), 7.0]), None, None, most_k=max(k, 7), space=space)
    kept = found > NEGLIGIBLE / 2
    for row, size in enumerate((k, 7)):
        threshold = scores[row].sort(descending=True).values[size - 1]
        assert torch.equal(kept[row], scores[row] >= threshold)


def test_a_row_with_penalties_remembers_no_more_than_it_can_hold() -> None:
    """On a GPU a thousand rows of the model's whole length would take a gigabyte that nobody planned for."""
    for max_tokens, size in ((5, 9), (None, 65), (1000, 65), (0, 5)):
        rows = RowSamplingState(1, V, 64, torch.device("cpu"))
        rows.start(row_start(0, SamplingSpec(presence_penalty=1.0, max_tokens=max_tokens), [4, 5, 4]))
        assert rows.processors_of(np.zeros(1, np.int32))[0]._history.shape == (size,)
