"""The CPU ops against the reference: whole models over the paged cache, and odd shapes of single ops."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chorale.kernels.cpu.library import library
from chorale.kernels.cpu.linear import CpuLinear
from chorale.kernels.cpu.ops import cpu_ops
from chorale.kernels.cpu.sampler import CpuSampler
from chorale.kernels.ops import NO_FINITE_LOGITS, NOTHING_ALLOWED, Allowed, SamplingInputs
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.kernels.reference.sampling.noise import row_keys
from chorale.kernels.reference.sampling.sampling import Needs, ReferenceSampler
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import Target, load_weights
from tests.support.device.model import SMALL, largest_difference, prompt
from tests.support.device.paged import PagedRunner, Sequence
from tests.support.kernels.filter_answers import ANSWERS, answer_rows

SETS = ["amx", "avx512_vnni", "avx_vnni", "avx2", "neon_dotprod", "generic"]
ODD = {**SMALL, "hidden": 96, "inter": 160, "heads": 6, "kv_heads": 2, "head_dim": 24, "experts": 5}
SHAPES: dict[str, dict[str, Any]] = {"small": SMALL, "odd": ODD}


@pytest.fixture(params=SETS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each instruction set that this processor and the build have."""
    if library().functions is None and not library().why_not.startswith("CHORALE"):
        pytest.skip(library().why_not)
    monkeypatch.setenv("CHORALE_CPU_ISA", request.param)
    library.cache_clear()
    if library().functions is None:
        library.cache_clear()
        pytest.skip(library().why_not)
    yield request.param
    library.cache_clear()


@functools.cache
def reference_logits(shape: str) -> torch.Tensor:
    """The same whichever instruction set is tried."""
    with tempfile.TemporaryDirectory() as folder:
        made = write_random_checkpoint(Path(folder) / "m", make_config(**SHAPES[shape]), seed=1)
        return _logits(make_model(made, REFERENCE_OPS))


def make_model(folder: Path, ops: Any, dtype: torch.dtype = torch.float32) -> GptOss:
    config = ModelConfig.load(folder)
    return GptOss(config, load_weights(folder, Target(config, ops, dtype)), ops, 4096)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_model(isa: str, shape: str, tmp_path: Path) -> None:
    """Prompts in chunks, decodes and both at once; freed blocks hold NaN."""
    folder = write_random_checkpoint(tmp_path / "m", make_config(**SHAPES[shape]), seed=1)
    expected, found = reference_logits(shape), _logits(make_model(folder, cpu_ops("exact")))
    assert largest_difference(found, expected) < 1e-3
    rounded = _logits(make_model(folder, cpu_ops("int8")))
    # Rounding sometimes changes which experts a token gets, so the largest difference says little.
    assert 1e-4 < (rounded.log_softmax(-1) - expected.log_softmax(-1)).abs().mean() < 0.03


def _logits(model: GptOss) -> torch.Tensor:
    runner = PagedRunner(model, seed=3)
    runner.poison_free_blocks()
    long, short = Sequence(prompt(300, 1)), Sequence(prompt(40, 2))
    steps = [[(long, 150)], [(long, 30), (short, 1)], [(short, 1), (long, 1)], [(long, 119), (short, 38)]]
    return torch.cat([logits for work in steps for logits in runner.step(work)])


def test_the_same_tokens(isa: str) -> None:
    """Greedy and random rows, with forbidden ids, grammars and early stops; and rows without a token."""
    torch.manual_seed(4)
    vocab, rows = 20_011, 12
    logits = torch.randn(rows, vocab) * 3
    temperature = torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.7])
    octets = torch.randint(0, 256, (2, vocab // 8 + 1), dtype=torch.uint8)
    octets[1] = 0
    index = torch.tensor([-1, 0, 0, 1, -1, 0, -1, -1, -1, -1, -1, 0], dtype=torch.int32)
    stops = torch.full((rows, 8), -1, dtype=torch.int32)
    stops[4, :3] = logits[4].topk(3).indices
    stops[0, :2] = logits[0].topk(2).indices
    logits[6, 5], logits[7, 9], logits[8] = torch.nan, torch.inf, -torch.inf
    keys = torch.from_numpy(row_keys(np.arange(rows).astype(np.uint64), np.arange(rows) * 7))
    draws = SamplingInputs(
        keys, temperature, torch.arange(rows, dtype=torch.int32), None, Allowed(index, octets), stops
    )
    found, expected = (_sample(sampler, logits, draws) for sampler in (CpuSampler, ReferenceSampler))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[0][[3, 6, 7, 8]].tolist() == [
        NOTHING_ALLOWED, NO_FINITE_LOGITS, NO_FINITE_LOGITS, NO_FINITE_LOGITS,
    ]  # fmt: skip


def test_rows_after_logits_processors_get_the_same_tokens(isa: str) -> None:
    """And the reason why one has none is found in its logits before them."""
    torch.manual_seed(7)
    vocab, rows = 20_011, 9
    logits = torch.randn(rows, vocab) * 3
    logits[1, 5], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    keys = torch.randint(-(2**31), 2**31, (rows, 2), dtype=torch.int32)
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.7, 1.0, 1.0, 0.0, 2.0])
    filters = torch.tensor([[vocab, 1.0, 0.0], [50, 0.9, 0.02], [7, 1.0, 0.0]]).repeat(3, 1)
    forbidden = (torch.arange(vocab) % 100 == 0).to(torch.uint8)
    found = []
    for number, some in ((number, some) for number in range(2) for some in (None, filters)):
        sampler = (CpuSampler, ReferenceSampler)[number](forbidden, rows)
        scores = sampler.permitted(logits)
        scores[:, 10:400] += 4.0
        scores[2, 9] = -torch.inf  # hides what was wrong
        scores[5] = -torch.inf
        scores[6, 33] = torch.inf
        needs = Needs(True, False, (some is not None,) * 3, 50)
        draws = SamplingInputs(keys, temperature, torch.arange(rows).int(), some)
        found.append(sampler.choose(scores, logits, draws, needs))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    none = [NO_FINITE_LOGITS, NO_FINITE_LOGITS, NO_FINITE_LOGITS, NOTHING_ALLOWED, NOTHING_ALLOWED]
    assert found[0][[1, 2, 3, 5, 6]].tolist() == none
    assert (found[0][[0, 4, 7, 8]] >= 0).all()


def _sample(make: Any, logits: torch.Tensor, draws: SamplingInputs) -> tuple[torch.Tensor, torch.Tensor]:
    forbidden = (torch.rand(logits.shape[1], generator=torch.Generator().manual_seed(9)) < 0.01).to(
        torch.uint8
    )
    last, out = torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits), dtype=torch.int64)
    make(forbidden, len(logits))(logits.clone(), draws, last, out)
    return out, last


def test_noise_is_that_of_the_reference(isa: str) -> None:
    """5,000 random rows draw the same tokens: another hash, or a worse logarithm, would not."""
    torch.manual_seed(5)
    logits = torch.randn(5000, 1003)
    keys = torch.randint(-(2**31), 2**31, (5000, 2), dtype=torch.int32)
    draws = SamplingInputs(keys, torch.ones(5000), torch.arange(5000, dtype=torch.int32))
    found, expected = (_sample(sampler, logits, draws)[0] for sampler in (CpuSampler, ReferenceSampler))
    assert torch.equal(found, expected)


@functools.cache
def filtered_rows(
    kind: str,
) -> tuple[list[tuple[int, float, float]], torch.Tensor, SamplingInputs, torch.Tensor]:
    """Filters, logits, draws, and the tokens of the reference, which takes longer than the rest."""
    torch.manual_seed(6)
    vocab = 33_333  # more than one part of each pass, and no whole vector at the end
    scale = {"normal": 3.0, "flat": 0.01, "steep": 60.0, "ties": 1.0}[kind]
    choices = [
        (k, p, m)
        for k in (1, 2, 50, 5000, vocab - 400, vocab)
        for p in (1e-6, 0.3, 0.95, 0.999999, 1.0)
        for m in (0.0, 0.02, 1.0)
    ]
    rows = len(choices)
    logits = torch.randn(rows, vocab) * scale
    if kind == "ties":
        logits = logits.round()
    octets = torch.randint(0, 256, (1, vocab // 8 + 1), dtype=torch.uint8)
    allowed = Allowed(torch.arange(rows, dtype=torch.int32) % 3 - 2, octets)  # every third row has a grammar
    keys = torch.randint(-(2**31), 2**31, (rows, 2), dtype=torch.int32)
    temperature = torch.tensor([0.0, *[0.6, 1.0, 1.7] * rows])[:rows]
    device_rows = torch.arange(rows, dtype=torch.int32)
    draws = SamplingInputs(keys, temperature, device_rows, torch.tensor(choices), allowed)
    return choices, logits, draws, _sample(ReferenceSampler, logits, draws)[0]


@pytest.mark.parametrize("kind", ["normal", "flat", "steep", "ties"])
def test_filters_keep_the_tokens_of_the_reference(isa: str, kind: str) -> None:
    """Alone and together, with values that keep one token, all, or as many as can be drawn."""
    choices, logits, draws, expected = filtered_rows(kind)
    found = _sample(CpuSampler, logits, draws)[0]
    assert torch.equal(found, expected), [choices[i] for i in (found != expected).nonzero()[:5, 0]]


@pytest.mark.parametrize("make", [CpuSampler, ReferenceSampler])
def test_filters_keep_the_known_tokens_in_vllms_order(isa: str, make: Any) -> None:
    logits, filters, left = answer_rows(500)
    forbidden, draws = torch.zeros(500, dtype=torch.uint8), 300
    torch.manual_seed(8)
    keys = torch.randint(-(2**31), 2**31, (draws, 2), dtype=torch.int32)
    rows, out = torch.arange(draws, dtype=torch.int32), torch.zeros(draws, dtype=torch.int64)
    for row, expected in enumerate(left):
        given = SamplingInputs(keys, torch.ones(draws), rows, filters[row].repeat(draws, 1))
        make(forbidden, draws)(logits[row].repeat(draws, 1), given, torch.zeros_like(out), out)
        assert set(out.tolist()) == expected, ANSWERS[row]


def test_a_token_does_not_depend_on_its_batch(isa: str, tmp_path: Path) -> None:
    """The same bits alone, in chunks, and beside others. With tiles only in exact: see below."""
    folder = write_random_checkpoint(tmp_path / "m", make_config(**SMALL), seed=1)
    for precision in ("exact",) if isa == "amx" else ("exact", "int8"):
        expected, chunks, crowd = _one_prompt(make_model(folder, cpu_ops(precision)))
        assert torch.equal(chunks, expected)
        assert torch.equal(crowd, expected)


def test_tiles_depend_on_a_batch_by_their_rounding_only(tmp_path: Path, isa: str) -> None:
    """Inputs have 8 bits of their own in a block or 8 significant ones. Both are this far from exact ones."""
    if isa != "amx":
        pytest.skip("no tiles")
    folder = write_random_checkpoint(tmp_path / "m", make_config(**SMALL), seed=1)
    exact = _one_prompt(make_model(folder, cpu_ops("exact")))[0].log_softmax(-1)
    for found in _one_prompt(make_model(folder, cpu_ops("int8"))):
        assert 1e-4 < (found.log_softmax(-1) - exact).abs().mean() < 0.03


def _one_prompt(model: GptOss) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of 200 tokens: alone, in chunks of 7, and beside others."""
    tokens, others = prompt(200, 1), [prompt(n, n) for n in (3, 50, 7)]
    runner = PagedRunner(model, seed=8)
    crowd = [Sequence(tokens), *map(Sequence, others)]
    beside = runner.step([(each, len(each.tokens)) for each in crowd])[0]
    return PagedRunner(model).run(tokens), PagedRunner(model).run(tokens, chunk=7), beside


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (3, 31), (5, 33), (70, 129), (9, 2880), (257, 64)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9, 16, 49, 150])
def test_dense_products_of_odd_shapes(isa: str, rows: int, columns: int, tokens: int) -> None:
    torch.manual_seed(rows * columns + tokens)
    weight, bias, x = torch.randn(rows, columns), torch.randn(rows), torch.randn(tokens, columns)
    expected = x @ weight.t() + bias
    assert torch.allclose(CpuLinear(weight, bias, "exact")(x), expected, atol=1e-4, rtol=1e-5)
    narrow = weight.bfloat16()
    exact = x @ narrow.float().t() + bias
    assert torch.allclose(CpuLinear(narrow, bias, "exact")(x), exact, atol=1e-4, rtol=1e-5)
    rounded = CpuLinear(weight, bias, "int8")(x)
    assert (rounded - expected).norm() < 0.012 * expected.norm() + 1e-6


@pytest.mark.parametrize("tokens", [5, 20])
def test_inputs_that_are_not_finite(isa: str, tokens: int) -> None:
    """They spoil their own token only."""
    weight, x = torch.randn(40, 96), torch.randn(tokens, 96)
    x[1, 3], x[2, 70] = torch.nan, torch.inf
    for precision in ("exact", "int8"):
        found = CpuLinear(weight, None, precision)(x)
        assert found[[0, *range(3, tokens)]].isfinite().all()
        assert not found[[1, 2]].isfinite().any()
