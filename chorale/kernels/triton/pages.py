"""Copies of pages between the KV tensors and a staging buffer. One launch copies any number of pages for all
tensors of one size: the kernel reads the tensors' addresses from a table on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PART = 4096  # words of a page per program
BLOCK = 1024  # words at a time
_WORDS = {8: torch.int64, 4: torch.int32, 1: torch.uint8}


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr"])
def _pages_kernel(
    address_ptr,  # [L] int64: start address of each KV tensor
    blocks_ptr,  # [N] int32
    pages_ptr,  # [N, PAGE] words
    FIRST: tl.constexpr,  # index of the first tensor's first word in a page
    WIDTH: tl.constexpr,  # words per block and tensor
    PAGE: tl.constexpr,
    IS_GATHER: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    page, tensor, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tl.load(blocks_ptr + page).to(tl.int64)
    address = tl.load(address_ptr + tensor).to(tl.pointer_type(pages_ptr.dtype.element_ty))
    in_pool = tl.multiple_of(address, 16) + block * WIDTH
    in_page = pages_ptr + page.to(tl.int64) * PAGE + FIRST + tensor * WIDTH
    for begin in range(part * PART, tl.minimum(part * PART + PART, WIDTH), BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places < WIDTH
        if IS_GATHER:
            tl.store(in_page + places, tl.load(in_pool + places, mask=inside), mask=inside)
        else:
            tl.store(in_pool + places, tl.load(in_page + places, mask=inside), mask=inside)


@dataclass(frozen=True, slots=True)
class _Tensors:
    """KV tensors with blocks of the same size, which are adjacent in a page."""

    addresses: torch.Tensor  # [L] int64
    first: int  # words
    width: int


class TritonPageCopies:
    """``kernels.ops.PageCopies``. The tensors must keep their memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes = [tensor[0].nbytes for tensor in tensors]
        self._kept = tuple(tensors)
        self._word = max(size for size in _WORDS if not any(own % size for own in sizes))
        self._groups: list[_Tensors] = []
        first = begin = 0
        for place, size in enumerate(sizes):
            if place + 1 == len(sizes) or sizes[place + 1] != size:
                some, width = tensors[begin : place + 1], size // self._word
                addresses = torch.tensor([each.data_ptr() for each in some], device=tensors[0].device)
                self._groups.append(_Tensors(addresses, first, width))
                first, begin = first + len(some) * width, place + 1
        self._page = first

    def gather(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        self._copy(blocks, pages, is_gather=True)

    def scatter(self, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        self._copy(blocks, pages, is_gather=False)

    def _copy(self, blocks: torch.Tensor, pages: torch.Tensor, *, is_gather: bool) -> None:
        words = pages.view(_WORDS[self._word])
        for group in self._groups:
            _pages_kernel[(len(blocks), len(group.addresses), triton.cdiv(group.width, PART))](
                group.addresses, blocks, words,
                FIRST=group.first, WIDTH=group.width, PAGE=self._page, IS_GATHER=is_gather,
                PART=PART, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
