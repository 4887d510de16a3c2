"""Muon for the matrices, AdamW for everything else; warm-up, plateau, linear decay to nothing.

Muon (Jordan et al., 2024): momentum, then an orthogonalising Newton-Schulz iteration, so that every singular
direction of a matrix moves by the same amount. Expert stacks are batches of matrices, and so are the same
matrices of all layers.
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


def muon_update(grad: torch.Tensor, buffer: torch.Tensor, momentum: float) -> torch.Tensor:
    """The orthogonalised Nesterov step, scaled to a root-mean-square entry of about 0.2. Moves ``buffer``."""
    buffer.lerp_(grad, 1 - momentum)
    update = orthogonalise(grad.lerp(buffer, momentum))
    return update.float() * (0.2 * max(grad.shape[-2:]) ** 0.5)


class Muon(torch.optim.Optimizer):
    """``lr`` is the root-mean-square change of an entry relative to 0.2, as in Moonlight's scaling."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ):
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            shapes.setdefault(param.shape, []).append(param)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([{"params": group} for group in shapes.values()], defaults)
        on_gpu = params[0].is_cuda
        self.update = torch.compile(muon_update, dynamic=False) if on_gpu else muon_update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = group["params"]
            grad = torch.stack([param.grad for param in params])
            state = self.state[params[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(grad)
            update = self.update(grad, state["momentum"], group["momentum"])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(update.unbind()), alpha=-group["lr"])


def build(net: nn.Module, lr_matrix: float, lr_rest: float) -> list[torch.optim.Optimizer]:
    """Muon on qkv, output, gate_up and down; AdamW on tables, corrections, router, norms, biases, sinks."""
    matrices, rest = [], []
    for name, param in net.named_parameters():
        is_matrix = name.rsplit(".", 1)[-1] in ("qkv", "output", "gate_up", "down")
        (matrices if is_matrix else rest).append(param)
    return [
        Muon(matrices, lr_matrix),
        torch.optim.AdamW(rest, lr=lr_rest, betas=(0.9, 0.97), weight_decay=0.0, fused=rest[0].is_cuda),
    ]


def schedule(progress: float, warm_up: float = 0.01, decay_from: float = 0.5) -> float:
    """The share of the peak learning rate at ``progress`` (0..1) of the run."""
    if progress < warm_up:
        return progress / warm_up
    if progress < decay_from:
        return 1.0
    return max(0.0, (1.0 - progress) / (1.0 - decay_from))
