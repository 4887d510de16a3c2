"""The copies of pages and the rows of host memory, against plain torch. As ``twins.py``: run through
``test_step_interpreter.py`` or on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from chorale.kernels.reference.pages import ReferencePageCopies
from chorale.kernels.triton.dense import host_rows
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.kernels.triton.pages import TritonPageCopies
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.model.weights import Target, load_weights
from tests.kernels.triton.twins import DEVICE

# Shapes of blocks, layer by layer: the last ones are a draft head's. Words of 8, of 4 and of 1 byte; pages of
# more than one part.
SHAPES = (
    ((2, 2, 4, 16), (2, 2, 4, 16), (2, 1, 4, 16)),
    ((2, 8, 64, 64), (2, 8, 64, 64), (2, 4, 64, 64)),
    ((2, 1, 1, 3),) * 3,
)

TINY = make_config(layers=2, experts=4, hidden=64, inter=64, heads=4, kv_heads=2, head_dim=16, vocab=512)


def filled(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Seven blocks, each byte its own."""
    made = torch.Generator().manual_seed(1)
    size = torch.empty(0, dtype=dtype).element_size()
    return [
        torch.randint(0, 255, (7, *shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=made)
        .view(dtype)
        .to(DEVICE)
        for shape in shapes
    ]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shapes", SHAPES)
def test_pages_return_unchanged(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    tensors = filled(shapes, dtype)
    before = [tensor.clone() for tensor in tensors]
    page_bytes = sum(tensor[0].nbytes for tensor in tensors)
    blocks = torch.tensor([9, 5, 0, 3], dtype=torch.int32, device=DEVICE)[1:]  # not aligned
    pages = torch.zeros(4, page_bytes, dtype=torch.uint8, device=DEVICE)
    theirs = torch.zeros_like(pages)
    ours = TritonPageCopies(tensors)
    ours.gather(blocks, pages[1:])
    ReferencePageCopies(tensors).gather(blocks, theirs[1:])
    assert torch.equal(pages, theirs)
    elsewhere = torch.tensor([1, 6, 2], dtype=torch.int32, device=DEVICE)
    ours.scatter(pages[1:], elsewhere)
    for tensor, old in zip(tensors, before, strict=True):
        for block, source in ((1, 5), (6, 0), (2, 3), (0, 0), (3, 3), (4, 4), (5, 5)):
            assert same(tensor[block], old[source])
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(old)
    ReferencePageCopies(tensors).scatter(theirs[1:], elsewhere)
    assert all(same(tensor[1], old[5]) for tensor, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("width", [2880, 40])
def test_rows_of_host_memory_have_the_bits_of_rows_on_the_device(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece of memory and in several, of which the last is shorter."""
    matrix = torch.randn(23, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    ids = torch.tensor([22, 0, 7, 7, 8, 15], device=DEVICE)
    for piece in (2**27, 8 * width * 4):
        monkeypatch.setattr(host_rows, "_PIECE", piece)
        packed = host_rows.pack_host_rows(matrix, torch.device(DEVICE))
        assert len(packed.pieces) == (1 if piece == 2**27 else 2 if dtype == torch.bfloat16 else 3)
        assert all(each.device.type == "cpu" for each in packed.pieces)
        assert torch.equal(packed.gather(ids), F.embedding(ids, matrix.to(DEVICE)).float())
        assert packed.gather(ids[:0]).shape == (0, width)


def test_a_checkpoint_is_loaded_with_its_embedding_in_host_memory(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, TINY)
    config, ids = ModelConfig.load(tmp_path), torch.tensor([511, 3, 0], device=DEVICE)
    usual, host = (
        load_weights(
            tmp_path, Target(config, TRITON_OPS, torch.bfloat16, torch.device(DEVICE), host_embedding=on_host)
        )
        for on_host in (False, True)
    )
    assert isinstance(host.embedding, host_rows.HostRows)
    assert torch.equal(TRITON_OPS.embed(host.embedding, ids), TRITON_OPS.embed(usual.embedding, ids))
    assert torch.equal(host.head.weight, usual.head.weight)
