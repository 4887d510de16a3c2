"""From a checkpoint folder to packed ``Weights``: the one loader, for all layouts.

What a parameter is called in a file is ``layouts.py``'s business, what it looks like in memory is the ops'.
On a CPU, whatever can stay a view of the mapped file does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from chorale.kernels.ops import ExpertTensors, Ops, QkvWeights, RouterWeights
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import LayerWeights, Weights

# (phase, fraction of the phase 0..1, message)
Progress = Callable[[str, float, str], None]


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    ops: Ops,
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Weights:
    """Map, check and pack a checkpoint in any of the three layouts.

    ``dtype`` is what dense weights and decoded experts are computed in. Raises ``CheckpointError`` naming
    file and tensor. The files must not change while the weights are in use.
    """
    checkpoint = Checkpoint(Path(folder), config)
    loader = _Loader(checkpoint, config, ops, torch.device(device), dtype)
    layers = []
    for layer in range(config.num_hidden_layers):
        if progress is not None:
            progress("load", layer / (config.num_hidden_layers + 1), f"layer {layer}")
        layers.append(loader.layer(layer))
    if progress is not None:
        message = "embedding and output"
        progress("load", config.num_hidden_layers / (config.num_hidden_layers + 1), message)
    weights = Weights(
        embedding=checkpoint.read(None, "embedding").to(device),
        layers=tuple(layers),
        final_norm=loader.float32(None, "final_norm"),
        head=ops.pack_head(loader.dense(None, "head")),
        num_parameters=config.num_parameters,
    )
    if progress is not None:
        progress("load", 1.0, f"{checkpoint.num_bytes / 1e9:.2f} GB")
    return weights


class _Loader:
    """Reads roles of one checkpoint in the dtypes that packing wants."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.ops = ops
        self.device = device
        self.dtype = dtype

    def layer(self, layer: int) -> LayerWeights:
        return LayerWeights(
            qkv=QkvWeights(
                norm=self.float32(layer, "attention_norm"),
                linear=self.ops.pack_linear(self.qkv(layer, "weight"), self.qkv(layer, "bias")),
            ),
            sinks=self.float32(layer, "sinks"),
            output=self.ops.pack_linear(self.dense(layer, "output.weight"), self.dense(layer, "output.bias")),
            router=RouterWeights(
                norm=self.float32(layer, "expert_norm"),
                # Small, and a rounded logit can choose another expert: float32 in every mode.
                linear=self.ops.pack_linear(
                    self.float32(layer, "router.weight"), self.float32(layer, "router.bias")
                ),
                top_k=self.config.num_experts_per_tok,
                dtype=self.dtype,
            ),
            experts=self.experts(layer),
        )

    def experts(self, layer: int) -> object:
        tensors = {
            field: self.checkpoint.read(layer, role).to(self.device)
            for field, role in _EXPERT_FIELDS.items()
            if self.checkpoint.has(layer, role)
        }
        return self.ops.pack_experts(
            ExpertTensors(
                **tensors,
                swiglu_limit=self.config.swiglu_limit,
                swiglu_alpha=self.config.swiglu_alpha,
                num_layers=self.config.num_hidden_layers,
                dtype=self.dtype,
            )
        )

    def qkv(self, layer: int, part: str) -> torch.Tensor:
        """One tensor in the reference layout, three elsewhere; rows in the order q, k, v."""
        if self.checkpoint.has(layer, f"qkv.{part}"):
            return self.dense(layer, f"qkv.{part}")
        return torch.cat([self.dense(layer, f"{name}.{part}") for name in "qkv"])

    def dense(self, layer: int | None, role: str) -> torch.Tensor:
        return self.checkpoint.read(layer, role).to(self.device, self.dtype)

    def float32(self, layer: int | None, role: str) -> torch.Tensor:
        return self.checkpoint.read(layer, role).to(self.device, torch.float32)


_EXPERT_FIELDS = {
    "gate_up_bias": "gate_up.bias",
    "down_bias": "down.bias",
    "gate_up_blocks": "gate_up.blocks",
    "gate_up_scales": "gate_up.scales",
    "down_blocks": "down.blocks",
    "down_scales": "down.scales",
    "gate_up": "gate_up.dense",
    "down": "down.dense",
}
