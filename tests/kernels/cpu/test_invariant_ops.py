"""``--batch-invariant`` on a CPU: the same bits in every batch and on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.kernels import select_ops
from chorale.kernels.cpu.invariant_ops import tree_sum
from chorale.kernels.ops import Precision
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import SHAPES, make_config
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import Target, load_weights
from chorale.parallel.rank import Rank
from chorale.parallel.shares import FixedSums, fixed_sums, make_shares
from tests.kernels.cpu.test_cpu_ops import isa as isa
from tests.parallel.ranks import on_ranks
from tests.support.device.model import prompt
from tests.support.device.paged import PagedRunner, Sequence

# Nine chunks of columns: ranks have 5 and 4, or 3, 2, 2 and 2.
SIZES: dict[str, Any] = {
    "layers": 2, "experts": 5, "hidden": 96, "inter": 9 * 32, "heads": 8, "kv_heads": 4, "head_dim": 16,
    "vocab": 1013, "sliding_window": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("m"), make_config(**SIZES), seed=1)


def results(
    folder: Path, name: str, size: int, precision: Precision, kv: torch.dtype
) -> list[tuple[torch.Tensor, ...]]:
    """Each rank's logits of 90 tokens: alone, in chunks of 17, and beside other prompts."""
    config = ModelConfig.load(folder)
    fixed = fixed_sums(EngineConfig(batch_invariant=True, tensor_parallel_size=size), config)

    def one(rank: Rank | None) -> tuple[torch.Tensor, ...]:
        ops = select_ops(name, "cpu", rank=rank, precision=precision, fixed=fixed)
        share = None if rank is None else rank.share
        weights = load_weights(folder, Target(config, ops, torch.float32, share=share))
        model = GptOss(config if share is None else config.part(share), weights, ops, 512)
        tokens, crowd = prompt(90, 1), [Sequence(prompt(n, n)) for n in (3, 40, 7)]
        runner = PagedRunner(model, seed=8, dtype=kv)
        own = Sequence(tokens)
        beside = runner.step([(each, len(each.tokens)) for each in (*crowd, own)])[-1]
        alone, chunks = (PagedRunner(model, dtype=kv).run(tokens, chunk=n) for n in (90, 17))
        return alone, chunks, beside

    with torch.inference_mode():
        return [one(None)] if size == 1 else on_ranks(make_shares(config, size), one)


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_bits_depend_neither_on_the_batch_nor_on_the_ranks(
    isa: str, precision: Precision, folder: Path
) -> None:
    expected = results(folder, "cpu", 1, precision, torch.float32)[0][0]
    for size in (1, 2, 4):
        for found in results(folder, "cpu", size, precision, torch.float32):
            assert all(torch.equal(each, expected) for each in found), size


@pytest.mark.parametrize(
    ("name", "size", "kv"),
    [("cpu", 1, torch.float8_e4m3fn), ("cpu", 2, torch.float8_e4m3fn), ("reference", 1, torch.float32)],
)
def test_tokens_that_torch_computes_are_computed_alone(
    name: str, size: int, kv: torch.dtype, folder: Path
) -> None:
    expected = results(folder, name, 1, "exact", kv)[0][0]
    for found in results(folder, name, size, "exact", kv):
        assert all(torch.equal(each, expected) for each in found)


def test_sums_are_a_tree_of_which_each_rank_has_a_branch() -> None:
    parts = list(torch.randn(8, 1000))
    halves = [tree_sum(parts[:4]), tree_sum(parts[4:])]
    assert torch.equal(tree_sum(parts), halves[0] + halves[1])
    assert torch.equal(halves[0], (parts[0] + parts[1]) + (parts[2] + parts[3]))


@pytest.mark.parametrize(("ranks", "parts"), [(1, 8), (2, 4), (8, 1)])
def test_parts_of_gpt_oss(ranks: int, parts: int) -> None:
    config = EngineConfig(batch_invariant=True, tensor_parallel_size=ranks)
    assert fixed_sums(config, make_config(**SHAPES["120b"])) == FixedSums(parts, parts, 64, 201_088)


@pytest.mark.parametrize(("name", "device"), [("reference", "cpu"), ("auto", "cuda")])
def test_ranks_without_kernels_for_it_are_refused(name: str, device: str, folder: Path) -> None:
    fixed = FixedSums(1, 1, 64, 1013)
    (share, _) = make_shares(ModelConfig.load(folder), 2)
    with pytest.raises(ConfigError, match="--batch-invariant"):
        select_ops(name, device, rank=Rank(share, None), fixed=fixed)  # type: ignore[arg-type]
