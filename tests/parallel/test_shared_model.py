"""The model on 2, 4 and 8 ranks: log-probabilities equal to one rank's, and what each rank reads."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chorale.kernels import select_ops
from chorale.kernels.ops import ForwardBatch
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.model.cuts import Cut, cut_of
from chorale.model.device_reader import pieces_of
from chorale.model.layouts import Layout
from chorale.model.safetensors_file import DTYPES
from chorale.model.weights import Target, load_weights, weight_shapes
from chorale.parallel.communicator import Silent
from chorale.parallel.rank import Rank
from tests.parallel.ranks import load_shared, on_ranks, shares_of
from tests.support.device.model import largest_difference, load_model
from tests.support.device.paged import PagedRunner

torch.set_num_threads(1)

# 9 chunks of intermediate columns, a vocabulary that no chunk divides, 8 KV heads.
ODD: dict[str, Any] = {
    "layers": 4,
    "experts": 7,
    "hidden": 96,
    "inter": 9 * 64,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 16,
    "vocab": 1013,
    "sliding_window": 32,
}
BOUND = 1e-5
TOKENS = torch.randint(0, ODD["vocab"], (70,), generator=torch.Generator().manual_seed(5)).tolist()


def write(folder: Path, layout: Layout = "published", **sizes: Any) -> Path:
    return write_random_checkpoint(folder, make_config(**{**ODD, **sizes}), layout=layout, seed=3)


@pytest.fixture(scope="module")
def exact(odd: Path) -> torch.Tensor:
    return of_one_rank(odd)


def of_one_rank(folder: Path) -> torch.Tensor:
    return PagedRunner(load_model(folder)).run(TOKENS, 33)


def of_ranks(folder: Path, size: int, *, by_expert: bool = False, ops: str = "reference") -> torch.Tensor:
    """Logits [70, V], the ranks' columns side by side."""

    def work(rank: Rank) -> torch.Tensor:
        return PagedRunner(load_shared(folder, rank, ops)).run(TOKENS, 33)

    return torch.cat(on_ranks(shares_of(folder, size, by_expert=by_expert), work), dim=-1)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_log_probabilities_equal_one_rank(odd: Path, exact: torch.Tensor, size: int) -> None:
    assert largest_difference(of_ranks(odd, size), exact) < BOUND


@pytest.mark.parametrize("layout", ["published", "dense", "reference", "quark"])
def test_every_layout(tmp_path: Path, layout: Layout) -> None:
    folder = write(tmp_path, layout, heads=8, kv_heads=4, inter=3 * 32)
    assert largest_difference(of_ranks(folder, 2), of_one_rank(folder)) < BOUND


@pytest.mark.parametrize("layout", ["published", "dense", "quark"])
def test_whole_experts_by_rank(tmp_path: Path, layout: Layout) -> None:
    folder = write(tmp_path, layout)
    assert largest_difference(of_ranks(folder, 4, by_expert=True), of_one_rank(folder)) < BOUND


def test_hidden_states_have_the_same_bits_on_all_ranks(odd: Path) -> None:
    def work(rank: Rank) -> torch.Tensor:
        model, seen = load_shared(odd, rank), []
        runner = PagedRunner(model)

        def forward(batch: ForwardBatch, kv: Any) -> torch.Tensor:
            seen.append(model.hidden(batch, kv))
            return torch.zeros(len(TOKENS), 1)

        runner.model.forward = forward  # type: ignore[method-assign]
        runner.run(TOKENS)
        return seen[0]

    first, *others = on_ranks(shares_of(odd, 4), work)
    assert all(torch.equal(first, other) for other in others)


def test_experts_of_a_large_model_stay_packed(
    odd: Path, exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chorale.kernels.reference.moe.DECODED_BUDGET", 0)
    assert largest_difference(of_ranks(odd, 2), exact) < BOUND


@pytest.mark.parametrize("layout", ["published", "quark"])
def test_each_rank_reads_its_share(tmp_path: Path, layout: Layout) -> None:
    """Every byte that is cut is read by one rank; only norms, biases and the router are read by all."""
    folder = write(tmp_path, layout)
    config = make_config(**ODD)
    checkpoint = Checkpoint(folder, config)
    shares = shares_of(folder, 4)
    for spec in [*checkpoint.specs(0), *checkpoint.specs(None)]:
        whole = checkpoint.read(spec.layer, spec.role)
        cuts = [cut_of(spec, config, share) for share in shares]
        if all(cut is None for cut in cuts):
            assert whole.numel() <= 7 * 576, spec.role
            continue
        parts = [cut.of(whole) for cut in cuts if cut is not None]
        assert torch.equal(torch.cat(parts, dim=cuts[0].dim), whole), spec.role  # type: ignore[union-attr]


@pytest.mark.parametrize("piece", [97, 2**12, 2**24])
def test_pieces_of_a_part(tmp_path: Path, piece: int) -> None:
    """What the threads of the device reader read and copy is the part of the tensor."""
    folder = write(tmp_path, "reference")
    config = make_config(**ODD)
    checkpoint, share = Checkpoint(folder, config), shares_of(folder, 4)[1]
    for spec in [*checkpoint.specs(1), *checkpoint.specs(None)]:
        cut = cut_of(spec, config, share) or Cut(0, (range(spec.shape[0]),))
        file, name = checkpoint.locate(spec.layer, spec.role)
        dtype = DTYPES[file.entries[name].dtype]
        expected = cut.of(checkpoint.read(spec.layer, spec.role))
        target = np.zeros(expected.numel() * dtype.itemsize, np.uint8)
        descriptor = os.open(file.path, os.O_RDONLY)
        for some in pieces_of(*cut.spans(spec.shape, dtype.itemsize), piece):
            assert some.stop - some.start <= piece
            some.read(descriptor, file.span(name)[0], target[some.start : some.stop], file.path)
        os.close(descriptor)
        found = torch.from_numpy(target).view(dtype).view(cut.shape(spec.shape))
        assert torch.equal(found, expected), spec.role


LOADING = """
import sys
from pathlib import Path
import torch
from chorale.kernels import select_ops
from chorale.model.config import ModelConfig
from chorale.model.weights import Target, load_weights
from chorale.parallel.communicator import Silent
from chorale.parallel.rank import Rank
from chorale.parallel.shares import make_shares

def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

folder, size, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = ModelConfig.load(folder)
rank = None if size == 1 else Rank(make_shares(config, size)[number], Silent(number, size))
ops = select_ops("reference", "cpu", rank=rank)
torch.zeros(8, 8) @ torch.zeros(8, 8)
before = peak()
share = None if rank is None else rank.share
weights = load_weights(folder, Target(config, ops, torch.float32, share=share))
weights.embedding.sum()
print(peak() - before)
"""


def test_the_peak_of_loading_is_a_share(tmp_path: Path) -> None:
    """Measured by the system, pages of the mapped files included."""
    sizes = {"experts": 8, "hidden": 256, "inter": 1024, "vocab": 50304, "layers": 4}
    folder = write(tmp_path, **sizes)

    def peak(size: int, rank: int) -> int:
        command = (sys.executable, "-c", LOADING, str(folder), str(size), str(rank))
        return int(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout)

    whole = peak(1, 0)
    assert whole > 150 * 2**20
    assert peak(4, 3) < whole / 4 + 32 * 2**20


@pytest.mark.parametrize("layout", ["published", "dense"])
def test_shapes_without_a_checkpoint_are_those_of_the_share(tmp_path: Path, layout: Layout) -> None:
    """What ``chorale warm`` compiles for."""
    folder = write(tmp_path, layout, layers=2)
    config = ModelConfig.load(folder)

    def shapes(found: Any) -> list[tuple[int, ...]]:
        if isinstance(found, torch.Tensor):
            return [tuple(found.shape)]
        if dataclasses.is_dataclass(found):
            return [shape for f in dataclasses.fields(found) for shape in shapes(getattr(found, f.name))]
        return [shape for each in found for shape in shapes(each)] if isinstance(found, tuple) else []

    for share in shares_of(folder, 4):
        ops = select_ops("reference", "cpu", rank=Rank(share, Silent(share.rank, 4)))
        real = load_weights(folder, Target(config, ops, torch.float32, share=share))
        made = weight_shapes(Target(config, ops, torch.float32, share=share), 2)
        assert shapes(made) == shapes(real)
