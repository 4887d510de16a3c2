"""The copies of pages, against plain torch. As ``twins.py``: run through ``test_step_interpreter.py`` or on a
GPU."""

from __future__ import annotations

import pytest
import torch

from chorale.kernels.reference.pages import ReferencePageCopies
from chorale.kernels.triton.pages import TritonPageCopies
from tests.kernels.triton.twins import DEVICE

# Shapes of blocks, layer by layer: the last ones are a draft head's. Words of 8, of 4 and of 1 byte; pages of
# more than one part.
SHAPES = (
    ((2, 2, 4, 16), (2, 2, 4, 16), (2, 1, 4, 16)),
    ((2, 8, 64, 64), (2, 8, 64, 64), (2, 4, 64, 64)),
    ((2, 1, 1, 3),) * 3,
)


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
