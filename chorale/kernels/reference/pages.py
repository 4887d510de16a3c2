"""Copies of pages between the KV tensors and a staging buffer: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ReferencePageCopies:
    """``kernels.ops.PageCopies`` in plain torch, for tensors on any device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._parts = [tensor.view(torch.uint8).view(tensor.shape[0], -1) for tensor in tensors]
        self._widths = [part.shape[1] for part in self._parts]

    def gather(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        for part, own in zip(self._parts, pages.split(self._widths, dim=1), strict=True):
            own.copy_(part.index_select(0, blocks))

    def scatter(self, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        for part, own in zip(self._parts, pages.split(self._widths, dim=1), strict=True):
            part.index_copy_(0, blocks.long(), own)
