"""Muon for the matrices, AdamW for everything else; warm-up, plateau, linear decay to nothing.

Muon (Jordan et al., 2024): momentum, then an orthogonalising Newton-Schulz iteration, so that every singular
direction of a matrix moves by the same amount. Expert stacks are batches of matrices.
"""

from __future__ import annotations

import torch
from torch import nn

_NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[..., N, K] -> roughly U V^T of its singular value decomposition, in bfloat16."""
    x = matrix.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """``lr`` is the root-mean-square change of an entry relative to 0.2, as in Moonlight's scaling."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                buffer = state.setdefault("momentum", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalise(param.grad.lerp(buffer, group["momentum"]))
                scale = 0.2 * max(param.shape[-2:]) ** 0.5
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update.to(param.dtype), alpha=-group["lr"] * scale)


def build(net: nn.Module, lr_matrix: float, lr_rest: float) -> list[torch.optim.Optimizer]:
    """Muon on qkv, output, gate_up and down; AdamW on tables, corrections, router, norms, biases, sinks."""
    matrices, rest = [], []
    for name, param in net.named_parameters():
        is_matrix = name.rsplit(".", 1)[-1] in ("qkv", "output", "gate_up", "down")
        (matrices if is_matrix else rest).append(param)
    return [
        Muon(matrices, lr_matrix),
        torch.optim.AdamW(rest, lr=lr_rest, betas=(0.9, 0.98), weight_decay=0.0, fused=rest[0].is_cuda),
    ]


def schedule(progress: float, warm_up: float = 0.02, decay_from: float = 0.55) -> float:
    """The share of the peak learning rate at ``progress`` (0..1) of the run."""
    if progress < warm_up:
        return progress / warm_up
    if progress < decay_from:
        return 1.0
    return max(0.0, (1.0 - progress) / (1.0 - decay_from))
