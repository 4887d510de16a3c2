"""Muon for the matrices, AdamW for everything else; warm-up, plateau, linear decay to zero.

Muon (Jordan et al., 2024): momentum, then an orthogonalising Newton-Schulz iteration, so that every singular
direction of a matrix moves by the same amount. Expert stacks are batches of matrices, and so are the same
matrices of all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Returns approximately U V^T of the singular value decomposition of [..., N, K], in bfloat16."""
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
    """Returns the orthogonalised Nesterov step, scaled to an RMS entry of about 0.2. Updates ``buffer``."""
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
        for group in self.param_groups if on_gpu else []:
            group["lr"] = torch.tensor(lr, device=params[0].device)
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
            torch._foreach_sub_(params, list((update * group["lr"]).unbind()))


# AdamW's step changes every entry by the rate, so parameters whose entries are summed (a logit is a sum of
# 256, and a row of the unembedding of 430 before that) need a smaller rate.
_RATES = {
    "embed_w": 0.3, "unembed_w": 0.1, "embed_d": 0.3, "unembed_d": 0.3, "router": 0.1,
    "map": 0.3, "corrections": 0.3,
}  # fmt: skip
_MATRICES = ("qkv", "output", "gate_up", "down", "fc")


def build(net: nn.Module, lr_matrix: float, lr_rest: float) -> list[torch.optim.Optimizer]:
    """Muon on qkv, output, gate_up, down and fc; AdamW on tables, corrections, router, norms, biases,
    sinks."""
    matrices: list[nn.Parameter] = []
    rest: dict[float, list[nn.Parameter]] = {}
    for name, param in net.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last in _MATRICES:
            matrices.append(param)
        else:
            rest.setdefault(_RATES.get(last, 1.0), []).append(param)
    on_gpu = matrices[0].is_cuda
    groups: list[dict[str, Any]] = [{"params": p, "lr": lr_rest * share} for share, p in rest.items()]
    for group in groups if on_gpu else []:
        group["lr"] = torch.tensor(group["lr"], device=matrices[0].device)
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.97), weight_decay=0.0, fused=on_gpu, capturable=on_gpu)
    return [Muon(matrices, lr_matrix), adam]


def set_share(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """Sets the learning rates to ``share`` of their peaks; fills tensors in place, for CUDA graphs."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "peak" not in group:
                group["peak"] = float(group["lr"])
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(group["peak"] * share)
            else:
                group["lr"] = group["peak"] * share


def schedule(progress: float, warm_up: float = 0.01, decay_from: float = 0.5) -> float:
    """Returns the share of the peak learning rate at ``progress`` (0..1) of the run."""
    if progress < warm_up:
        return progress / warm_up
    if progress < decay_from:
        return 1.0
    return max(0.0, (1.0 - progress) / (1.0 - decay_from))
