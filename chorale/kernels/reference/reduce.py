"""The sum over ranks with residual and norm in plain torch: the specification of the reduce kernels."""

from __future__ import annotations

import torch

from chorale.kernels.reference.ops import rms_norm


def sent_part(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum [T, H] float32 of a rank's parts [S, T, H], added in order, the bias last, rounded to
    the exchanged type ``dtype``."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if bias is not None:
        total = total + bias.float()
    return total.to(dtype).float()


def add_norm(
    sent: list[torch.Tensor], x: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add all ranks' sums [T, H] to x [T, H] float32, in the order of ranks. Returns (new x, normed x),
    float32."""
    total = sent[0]
    for part in sent[1:]:
        total = total + part
    x = x + total
    return x, rms_norm(x, norm, eps)
