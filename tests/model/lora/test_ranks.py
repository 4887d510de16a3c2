"""Adapters on several ranks: each has a part, and together they compute what one rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.kernels import select_ops
from chorale.kernels.adapters import Adapter
from chorale.kernels.cpu.library import library
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from chorale.model.gpt_oss import GptOss
from chorale.model.lora.read import read_adapter
from chorale.model.lora.share import part_of_rank
from chorale.model.weights import Target, load_weights
from chorale.parallel.rank import Rank
from chorale.parallel.shares import fixed_sums, make_shares
from tests.kernels.cpu.test_invariant_ops import SIZES
from tests.parallel.ranks import load_shared, on_ranks
from tests.support.device.lora import FORMATS, write_adapter
from tests.support.device.model import largest_difference, prompt
from tests.support.device.paged import PagedRunner, Sequence

torch.set_num_threads(1)
CONFIG = make_config(**{**SIZES, "experts": 8})
TOKENS = prompt(12, 1)
BOUND = 2e-5  # float32 rounding of sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("m"), CONFIG, seed=1)


def adapters_of(folder: Path, *forms: str) -> list[Adapter]:
    for seed, form in enumerate(forms):
        write_adapter(folder / form, CONFIG, form, seed)
    return [read_adapter(folder / form, CONFIG).map(torch.Tensor.float) for form in forms]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("by_expert", [False, True], ids=["columns", "whole experts"])
def test_ranks_compute_what_one_computes(folder: Path, tmp_path: Path, form: str, by_expert: bool) -> None:
    (adapter,) = adapters_of(tmp_path, form)

    def work(rank: Rank) -> torch.Tensor:
        own = part_of_rank(adapter, CONFIG, rank.share)
        return PagedRunner(load_shared(folder, rank)).run(TOKENS, 7, adapter=own)

    ops = select_ops("reference", "cpu")
    model = GptOss(CONFIG, load_weights(folder, Target(CONFIG, ops, torch.float32)), ops, 512)
    expected = PagedRunner(model).run(TOKENS, adapter=adapter)
    assert largest_difference(PagedRunner(model).run(TOKENS), expected) > 0.05
    for size in (2, 4):
        found = torch.cat(on_ranks(make_shares(CONFIG, size, by_expert=by_expert), work), dim=-1)
        assert largest_difference(found, expected) < BOUND, size


def invariant(folder: Path, size: int, adapters: list[Adapter]) -> list[tuple[torch.Tensor, ...]]:
    """Each rank's logits of a prompt with the first adapter: alone, in chunks, and beside other rows."""
    fixed = fixed_sums(EngineConfig(batch_invariant=True, tensor_parallel_size=size), CONFIG)

    def one(rank: Rank | None) -> tuple[torch.Tensor, ...]:
        share = None if rank is None else rank.share
        ops = select_ops("cpu", "cpu", rank=rank, fixed=fixed)
        weights = load_weights(folder, Target(CONFIG, ops, torch.float32, share=share))
        model = GptOss(CONFIG if share is None else CONFIG.part(share), weights, ops, 512)
        parts = adapters if share is None else [part_of_rank(each, CONFIG, share) for each in adapters]
        rows = [Sequence(prompt(n, n), adapter=each) for n, each in ((3, None), (4, parts[1]))]
        rows += [Sequence(TOKENS, adapter=parts[0]), Sequence(TOKENS)]
        *_, beside, base = PagedRunner(model, seed=8).step([(each, len(each.tokens)) for each in rows])
        alone, chunks = (PagedRunner(model).run(TOKENS, chunk=n, adapter=parts[0]) for n in (12, 5))
        return alone, chunks, beside, base

    with torch.inference_mode():
        return [one(None)] if size == 1 else on_ranks(make_shares(CONFIG, size), one)


@pytest.mark.skipif(library().functions is None, reason="the CPU library was not built")
@pytest.mark.parametrize("form", ["bias", "router", "head", "tinker"])
def test_bits_depend_neither_on_the_batch_nor_on_the_ranks(folder: Path, tmp_path: Path, form: str) -> None:
    adapters = adapters_of(tmp_path, form, "attention")
    ((expected, *_, base),) = invariant(folder, 1, adapters)
    assert largest_difference(base, expected) > 0.05
    for size in (1, 2, 4):
        for alone, chunks, beside, plain in invariant(folder, size, adapters):
            assert all(torch.equal(each, expected) for each in (alone, chunks, beside)), size
            assert torch.equal(plain, base), size
