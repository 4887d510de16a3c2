"""Converts an archive back to parameters, to evaluate the shipped model or to continue its training."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from chorale.harmony.vocab import VOCAB_SIZE, load_vocabulary
from chorale.kernels import mxfp4
from chorale.model.demo.archive import demo_config
from training.features import token_features
from training.net import DemoNet, Layer

_SAME = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "sinks": "self_attn.sinks",
    "output": "self_attn.o_proj.weight",
    "output_bias": "self_attn.o_proj.bias",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "down_bias": "mlp.experts.down_proj_bias",
}


def restore(archive: Path) -> DemoNet:
    """Returns the net of an archive with the same quantisation."""
    tensors = load_file(archive)
    vocab = load_vocabulary()
    features = torch.from_numpy(token_features([vocab.token_bytes(i) for i in range(VOCAB_SIZE)]))
    width = len(tensors["demo.embed_w"])  # fewer in archives without spelling features
    net = DemoNet(demo_config(), features[:, :width], tensors["demo.corrected"].long())
    with torch.no_grad():
        for index, layer in enumerate(net.layers):
            assert isinstance(layer, Layer)
            _restore_layer(layer, tensors, f"model.layers.{index}.")
        net.final_norm.copy_(tensors["model.norm.weight"])
        for side in ("embed", "unembed"):
            getattr(net, f"{side}_w").copy_(tensors[f"demo.{side}_w"])
            rows = tensors[f"demo.{side}_d"].float() * tensors[f"demo.{side}_d_scale"].unsqueeze(-1)
            getattr(net, f"{side}_d").copy_(rows)
    net.quantise = True
    return net


def start_from(net: DemoNet, archive: Path) -> None:
    """Copies an archive's parameters to a new net, to continue training.

    Features that the archive lacks start at zero. A token with a correction row in both keeps it; other
    correction rows start at zero.
    """
    old = restore(archive)
    with torch.no_grad():
        given = dict(old.named_parameters())
        for name, parameter in net.named_parameters():
            if name in ("embed_d", "unembed_d"):
                row_of = {token: row for row, token in enumerate(old.corrected.tolist())}
                kept = [(row, token) for row, token in enumerate(net.corrected.tolist()) if token in row_of]
                here = torch.tensor([row for row, _ in kept])
                parameter[here] = given[name][torch.tensor([row_of[token] for _, token in kept])]
            elif name in ("embed_w", "unembed_w"):
                parameter.zero_()
                parameter[: len(given[name])] = given[name]
            else:
                parameter.copy_(given[name])


def _restore_layer(layer: Layer, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    for name, published in _SAME.items():
        getattr(layer, name).copy_(tensors[prefix + published])
    for part, target in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        target.copy_(torch.cat([tensors[f"{prefix}self_attn.{one}_proj.{part}"] for one in "qkv"]))
    for name, target in (("gate_up_proj", layer.gate_up), ("down_proj", layer.down)):
        stem = f"{prefix}mlp.experts.{name}"
        target.copy_(mxfp4.dequantize(tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"], torch.float32))
