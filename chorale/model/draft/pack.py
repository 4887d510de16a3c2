"""Packs a head's tensors, by name (``tensor_shapes``), into ``HeadWeights``. Products may have biases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from chorale.kernels.ops import HeadNorms, Ops, PairNorms
from chorale.model.draft.config import HeadConfig, tensor_shapes
from chorale.model.draft.head import ContextWeights, HeadWeights, LayerWeights, draft_ops

Read = Callable[[str], torch.Tensor | None]  # name -> tensor on the device, or None if it is missing


def pack_weights(
    config: HeadConfig, read: Read, token_ids: torch.Tensor, ops: Ops, dtype: torch.dtype
) -> HeadWeights:
    """Pack the tensors. ``dtype``: type of products. The embedding keeps its type."""
    return _Packer(config, read, ops, dtype).weights(token_ids)


def weight_shapes(config: HeadConfig, ops: Ops, dtype: torch.dtype) -> HeadWeights:
    """Return packed weights as meta tensors, without a file, in the types of published heads."""
    shapes = tensor_shapes(config)

    def read(name: str) -> torch.Tensor | None:
        return torch.empty(shapes[name], dtype=dtype, device="meta") if name in shapes else None

    token_ids = torch.empty(config.draft_vocab_size, dtype=torch.int64, device="meta")
    return pack_weights(config, read, token_ids, ops, dtype)


class _Packer:
    def __init__(self, config: HeadConfig, read: Read, ops: Ops, dtype: torch.dtype) -> None:
        self._config, self._read, self._ops, self._dtype = config, read, ops, dtype
        self._draft = draft_ops(ops)

    def weights(self, token_ids: torch.Tensor) -> HeadWeights:
        config = self._config
        aux_norms = [self._norm(name) for name in config.aux_norm_names]
        return HeadWeights(
            embedding=self._whole("embed_tokens.weight"),
            aux_norm=torch.stack(aux_norms) if aux_norms else None,
            fc=self._linear("fc") if config.has_fc else None,
            pair=PairNorms(
                self._norm("layers.0.input_layernorm.weight"),
                self._norm(config.state_norm),
                config.norm_before_residual,
                self._dtype,
            ),
            layers=tuple(self._layer(number) for number in range(config.num_layers)),
            context=self._context() if config.kind == "dflash" else None,
            mask=self._norm("mask_hidden").unsqueeze(0) if config.kind == "peagle" else None,
            final_norm=self._norm("norm.weight"),
            head=self._ops.pack_head(self._dense("lm_head")),
            token_ids=token_ids,
        )

    def _layer(self, number: int) -> LayerWeights:
        layer = f"layers.{number}."
        return LayerWeights(
            norm=self._norm(f"{layer}input_layernorm.weight"),
            qkv=self._rows([f"{layer}self_attn.{name}_proj" for name in "qkv"]),
            head_norms=self._head_norms([number], "qk") if self._config.kind == "dflash" else None,
            output=self._linear(f"{layer}self_attn.o_proj"),
            mlp_norm=self._norm(f"{layer}post_attention_layernorm.weight"),
            gate_up=self._draft.pack_gated(
                self._dense(f"{layer}mlp.gate_proj"), self._dense(f"{layer}mlp.up_proj")
            ),
            down=self._linear(f"{layer}mlp.down_proj"),
        )

    def _context(self) -> ContextWeights:
        layers = range(self._config.num_layers)
        return ContextWeights(
            norm=self._norm(self._config.state_norm).unsqueeze(0),
            kv=self._rows([f"layers.{layer}.self_attn.{name}_proj" for layer in layers for name in "kv"]),
            head_norms=self._head_norms(layers, "k"),
        )

    def _head_norms(self, layers: Iterable[int], names: str) -> HeadNorms:
        counts = {"q": self._config.num_attention_heads, "k": self._config.num_key_value_heads}

        def norm(layer: int, name: str) -> torch.Tensor:
            return self._norm(f"layers.{layer}.self_attn.{name}_norm.weight").expand(counts[name], -1)

        rows = [torch.cat([norm(layer, name) for name in names]) for layer in layers]
        return HeadNorms(torch.stack(rows), self._dtype)

    def _rows(self, products: Sequence[str]) -> Any:
        """Pack the rows of several matrices, with a bias."""
        weights = [self._dense(product) for product in products]
        biases = [self._bias(product) for product in products]
        zeros = [weight.new_zeros(len(weight)) for weight in weights]  # the kernels always add a bias
        whole = [zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)]
        return self._ops.pack_linear(torch.cat(weights), torch.cat(whole))

    def _linear(self, product: str) -> Any:
        return self._ops.pack_linear(self._dense(product), self._bias(product))

    def _bias(self, product: str) -> torch.Tensor | None:
        bias = self._read(f"{product}.bias")
        return None if bias is None else bias.to(self._dtype)

    def _dense(self, product: str) -> torch.Tensor:
        return self._whole(f"{product}.weight").to(self._dtype)

    def _norm(self, name: str) -> torch.Tensor:
        return self._whole(name).float()

    def _whole(self, name: str) -> torch.Tensor:
        tensor = self._read(name)
        if tensor is None:
            raise KeyError(name)
        return tensor
