"""The sum over ranks with residual and norm: what the reducing kernels compute, in plain torch."""

from __future__ import annotations

import torch

from chorale.kernels.reference.ops import rms_norm


def sent_part(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A rank's part [T, H] float32 of its parts [S, T, H]: added in order, the bias last, rounded to
    ``dtype``, in which ranks send."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if bias is not None:
        total = total + bias.float()
    return total.to(dtype).float()


def add_norm(
    sent: list[torch.Tensor], x: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] float32 + all ranks' parts [T, H], in the order of the ranks -> (new x, its norm), float32."""
    total = sent[0]
    for part in sent[1:]:
        total = total + part
    x = x + total
    return x, rms_norm(x, norm, eps)
