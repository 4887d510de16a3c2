"""Packs a head's tensors, by role, into ``HeadWeights``.

Roles: ``embedding``, ``aux_norm``, ``fc``, ``mask``, ``state_norm``, ``final_norm``, ``head``; of the first
layer ``token_norm``, ``q``, ``k``, ``v``, ``q_norm``, ``k_norm``, ``output``, ``mlp_norm``, ``gate``, ``up``,
``down``, and of others ``1.q`` etc.; and biases such as ``q.bias``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from chorale.kernels.ops import HeadNorms, Ops, PairNorms
from chorale.model.draft.config import HeadConfig, role_of, tensor_shapes
from chorale.model.draft.head import ContextWeights, HeadWeights, LayerWeights, draft_ops

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
            layers=tuple(self._layer(number) for number in range(config.num_layers)),
            context=self._context() if config.kind == "dflash" else None,
            mask=self._norm("mask").unsqueeze(0) if config.kind == "peagle" else None,
            final_norm=self._norm("final_norm"),
            head=self._ops.pack_head(self._dense("head")),
            token_ids=token_ids,
        )

    def _layer(self, number: int) -> LayerWeights:
        def role(name: str) -> str:
            return role_of(number, name)

        return LayerWeights(
            norm=self._norm(role("token_norm")),
            qkv=self._rows([role(name) for name in "qkv"]),
            head_norms=self._head_norms([number], "qk") if self._config.kind == "dflash" else None,
            output=self._linear(role("output")),
            mlp_norm=self._norm(role("mlp_norm")),
            gate_up=self._draft.pack_gated(self._dense(role("gate")), self._dense(role("up"))),
            down=self._linear(role("down")),
        )

    def _context(self) -> ContextWeights:
        layers = range(self._config.num_layers)
        return ContextWeights(
            norm=self._norm("state_norm").unsqueeze(0),
            kv=self._rows([role_of(layer, name) for layer in layers for name in "kv"]),
            head_norms=self._head_norms(layers, "k"),
        )

    def _head_norms(self, layers: Iterable[int], names: str) -> HeadNorms:
        counts = {"q": self._config.num_attention_heads, "k": self._config.num_key_value_heads}
        rows = [
            torch.cat([self._norm(role_of(n, f"{name}_norm")).expand(counts[name], -1) for name in names])
            for n in layers
        ]
        return HeadNorms(torch.stack(rows), self._dtype)

    def _rows(self, roles: Sequence[str]) -> Any:
        """Pack the rows of several matrices, with a bias."""
        weights = [self._dense(role) for role in roles]
        biases = [self._bias(role) for role in roles]
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
