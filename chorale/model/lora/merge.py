"""MergedWeights: the tensors of a checkpoint with an adapter added, for a new checkpoint.

Experts that the adapter leaves alone keep their MXFP4 bytes, as long as no expert is adapted. Otherwise all
experts become bfloat16, or MXFP4 again, which rounds them; ``errors`` has the relative error of each tensor.
Sums are float32 and one expert at a time, so that a layer fits into memory.
"""

from __future__ import annotations

import torch

from chorale.errors import ConfigError
from chorale.kernels import mxfp4
from chorale.kernels.adapters import Adapter, ExpertLowRank, LayerAdapter, LowRank
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.layouts import Layout

_QKV = ("q", "k", "v")


class MergedWeights:
    """Gives tensors by layer and role, in the roles of ``layout``."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, adapter: Adapter, *, packs: bool = False
    ) -> None:
        """``packs``: adapted experts become MXFP4 again. Raises ``ConfigError`` for a checkpoint of AMD's
        quantizer."""
        if checkpoint.layout == "quark":
            raise ConfigError("checkpoints of AMD's quantizer cannot be merged; use the original one")
        self._checkpoint, self._config, self._adapter = checkpoint, config, adapter
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self._sizes = [config.head_dim * count for count in heads]
        self._is_packed = checkpoint.layout != "dense"
        self.adapts_experts = any(layer.has_experts for layer in adapter.layers)
        keeps = self._is_packed and (packs or not self.adapts_experts)
        self.layout: Layout = "published" if keeps else "dense"
        self.errors: dict[str, float] = {}  # name of a packed tensor -> relative error of its rounding

    def tensor(self, layer: int | None, role: str) -> torch.Tensor:
        """Return bfloat16, or uint8 for MXFP4 blocks and scales."""
        if layer is None:
            return self._of_model(role)
        own = self._adapter.layers[layer]
        name, _, kind = role.partition(".")
        if name in ("gate_up", "down") and kind != "bias":
            part = own.gate_up if name == "gate_up" else own.down
            return self._experts(layer, name, kind, part)
        whole = self._read(layer, role)
        if role in ("k_scale", "v_scale"):
            return whole.reshape(()).float()
        added = self._addition(own, name)
        if added is not None and kind == "weight":
            whole = whole.float() + added.b.float() @ added.a.float()
        elif added is not None and added.bias is not None:
            whole = whole.float() + added.bias.float()
        return whole.to(torch.bfloat16)

    def _addition(self, own: LayerAdapter, name: str) -> LowRank | None:
        """Return what the adapter adds to a matrix of attention or to the router."""
        if name not in _QKV:
            return {"output": own.output, "router": own.router}.get(name)
        first = sum(self._sizes[: _QKV.index(name)])
        return next((part for part in own.qkv if part.first == first), None)

    def _of_model(self, role: str) -> torch.Tensor:
        whole, head = self._checkpoint.read(None, role), self._adapter.head
        if role == "head" and isinstance(head, LowRank):
            whole = whole.float() + head.b.float() @ head.a.float()
        elif role == "head" and isinstance(head, torch.Tensor):
            whole = head
        return whole.to(torch.bfloat16)

    def _read(self, layer: int, role: str) -> torch.Tensor:
        """Read a tensor; q, k and v are parts of one tensor in the reference layout."""
        name, _, kind = role.partition(".")
        if name not in _QKV or self._checkpoint.has(layer, role):
            return self._checkpoint.read(layer, role)
        whole = self._checkpoint.read(layer, f"qkv.{kind}")
        first = _QKV.index(name)
        return whole.narrow(0, sum(self._sizes[:first]), self._sizes[first])

    # ------------------------------------------------------------------ experts

    def _experts(self, layer: int, name: str, kind: str, part: ExpertLowRank | None) -> torch.Tensor:
        if kind != "dense" and part is None:
            return self._checkpoint.read(layer, f"{name}.{kind}")
        dense = torch.stack(
            [self._expert(layer, name, n, part) for n in range(self._config.experts_in(layer))]
        )
        if kind == "dense":
            return dense
        blocks, scales = mxfp4.quantize(dense.transpose(1, 2).contiguous())
        if kind == "scales":
            return scales
        rounded = mxfp4.dequantize(blocks, scales, torch.float32).transpose(1, 2)
        error = (rounded - dense.float()).norm() / dense.float().norm()
        self.errors[f"layer {layer} {name}_proj"] = float(error)
        return blocks

    def _expert(self, layer: int, name: str, number: int, part: ExpertLowRank | None) -> torch.Tensor:
        """Return the weights of one expert, [K, N] bfloat16."""
        if self._is_packed:
            blocks, scales = (
                self._checkpoint.read(layer, f"{name}.{kind}")[number] for kind in ("blocks", "scales")
            )
            weight = mxfp4.dequantize(blocks, scales, torch.float32).t()
        else:
            weight = self._checkpoint.read(layer, f"{name}.dense")[number].float()
        own = None if part is None else part.of(number)
        if own is not None:
            weight = weight + own.a.float().t() @ own.b.float().t()
        return weight.to(torch.bfloat16)
