"""Matrix products of the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x weight + bias. Contraction dimension first: at one row torch's float32 GEMV reads that layout
    twice as fast as the checkpoint's (201,088 x 256 on 2 Zen 5 cores: 7.4 ms against 15.8 ms).
    """

    weight: torch.Tensor  # [K, N]
    bias: torch.Tensor | None  # [N]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, N] float32."""
        x = x.to(self.weight.dtype)
        y = x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)
        return y.float()


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """weight [N, K] as in the checkpoint. bfloat16 stays a view of the file; float32 is laid out for GEMV."""
    transposed = weight.t()
    return Linear(transposed.contiguous() if weight.dtype == torch.float32 else transposed, bias)
