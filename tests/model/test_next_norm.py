"""What ``moe`` norms for the next layer is read there, with that layer's norm; the last one's for nobody."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from chorale.kernels.reference import ops as reference
from chorale.model.config_writer import make_config
from tests.support.device.model import SMALL, MakeModel, prompt
from tests.support.device.paged import PagedRunner


def test_a_layer_uses_the_norm_of_the_previous_layer(make_model: MakeModel) -> None:
    model = make_model(make_config(**SMALL))
    read: list[bool] = []

    def moe(*given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, (following, eps) = reference.moe(*given)[0], given[-2:]
        return x, None if following is None else reference.rms_norm(x, following.norm, eps)

    def qkv(x: torch.Tensor, normed: torch.Tensor | None, *others: Any) -> torch.Tensor:
        read.append(normed is not None)
        x = x if normed is None else torch.full_like(x, torch.nan)
        return reference.qkv_rope_cache(x, normed, *others)

    ahead = copy.copy(model)
    ahead.ops = dataclasses.replace(model.ops, moe=moe, qkv_rope_cache=qkv)
    assert len({layer.qkv.norm.sum().item() for layer in model.weights.layers}) == 4
    tokens = prompt(30)
    assert torch.equal(PagedRunner(ahead).run(tokens), PagedRunner(model).run(tokens))
    assert read == [False, True, True, True] * (len(read) // 4)
