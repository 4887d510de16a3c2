"""Packs a head's tensors, by role, into ``HeadWeights``.

Roles: ``embedding``, ``aux_norm``, ``fc``, ``token_norm``, ``state_norm``, ``q``, ``k``, ``v``, ``output``,
``mlp_norm``, ``gate``, ``up``, ``down``, ``final_norm``, ``head``, and biases such as ``q.bias``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chorale.kernels.ops import Ops, PairNorms
from chorale.model.draft.config import HeadConfig, tensor_shapes
from chorale.model.draft.head import HeadWeights, draft_ops

Read = Callable[[str], torch.Tensor | None]  # role -> tensor on the device, or None if it is missing


def pack_weights(
    config: HeadConfig, read: Read, token_ids: torch.Tensor, ops: Ops, dtype: torch.dtype
) -> HeadWeights:
    """Pack the tensors. ``dtype``: type of products. The embedding keeps its type."""
    return _Packer(config, read, ops, dtype).weights(token_ids)


def weight_shapes(config: HeadConfig, ops: Ops, dtype: torch.dtype) -> HeadWeights:
    """Return packed weights as meta tensors, without a file, in the types of published heads."""
    shapes = tensor_shapes(config)

    def read(role: str) -> torch.Tensor | None:
        return torch.empty(shapes[role], dtype=dtype, device="meta") if role in shapes else None

    token_ids = torch.empty(config.draft_vocab_size, dtype=torch.int64, device="meta")
    return pack_weights(config, read, token_ids, ops, dtype)


class _Packer:
    def __init__(self, config: HeadConfig, read: Read, ops: Ops, dtype: torch.dtype) -> None:
        self._config, self._read, self._ops, self._dtype = config, read, ops, dtype
        self._draft = draft_ops(ops)

    def weights(self, token_ids: torch.Tensor) -> HeadWeights:
        config = self._config
        has_fc, parts = self._config.has_fc, self._config.aux_norm_shape
        return HeadWeights(
            embedding=self._whole("embedding"),
            aux_norm=None if parts is None else self._norm("aux_norm").view(parts),
            fc=self._linear("fc") if has_fc else None,
            pair=PairNorms(
                self._norm("token_norm"),
                self._norm("state_norm"),
                config.norm_before_residual,
                self._dtype,
            ),
            qkv=self._qkv(),
            output=self._linear("output"),
            mlp_norm=self._norm("mlp_norm"),
            gate_up=self._draft.pack_gated(self._dense("gate"), self._dense("up")),
            down=self._linear("down"),
            final_norm=self._norm("final_norm"),
            head=self._ops.pack_head(self._dense("head")),
            token_ids=token_ids,
        )

    def _qkv(self) -> Any:
        weights = [self._dense(role) for role in "qkv"]
        biases = [self._bias(role) for role in "qkv"]
        zeros = [weight.new_zeros(len(weight)) for weight in weights]  # the kernels always add a bias
        whole = [zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)]
        return self._ops.pack_linear(torch.cat(weights), torch.cat(whole))

    def _linear(self, role: str) -> Any:
        return self._ops.pack_linear(self._dense(role), self._bias(role))

    def _bias(self, role: str) -> torch.Tensor | None:
        bias = self._read(f"{role}.bias")
        return None if bias is None else bias.to(self._dtype)

    def _dense(self, role: str) -> torch.Tensor:
        return self._whole(role).to(self._dtype)

    def _norm(self, role: str) -> torch.Tensor:
        return self._whole(role).float()

    def _whole(self, role: str) -> torch.Tensor:
        tensor = self._read(role)
        if tensor is None:
            raise KeyError(role)
        return tensor
