"""Converts the trained parameters to the archive that ships, which is small and loses no precision later.

Layers have the published tensor names (experts packed in MXFP4, the rest bfloat16). The two tables are kept
as their factors: ``demo.{embed,unembed}_w`` [features, hidden] bfloat16, ``demo.{embed,unembed}_d`` int8 rows
with ``..._d_scale`` float32, and ``demo.corrected`` the ids of those rows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from chorale.kernels import mxfp4
from training.net import DemoNet, Layer


def write_archive(net: DemoNet, path: Path) -> Path:
    """Write ``path``; about 11 MB for the demo's size."""
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(net.layers):
        assert isinstance(layer, Layer)
        tensors |= layer_tensors(layer, f"model.layers.{index}.", net)
    tensors["model.norm.weight"] = net.final_norm.bfloat16()
    tensors["demo.corrected"] = net.corrected.int()
    for side in ("embed", "unembed"):
        tensors[f"demo.{side}_w"] = getattr(net, f"{side}_w").bfloat16()
        rows = getattr(net, f"{side}_d").float()
        scale = rows.abs().amax(dim=-1).clamp(min=1e-8) / 127
        tensors[f"demo.{side}_d"] = torch.round(rows / scale.unsqueeze(-1)).to(torch.int8)
        tensors[f"demo.{side}_d_scale"] = scale
    detached = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(detached, path)
    return path


def layer_tensors(layer: Layer, prefix: str, net: DemoNet) -> dict[str, torch.Tensor]:
    """One layer under the published names."""
    config = net.config
    dim, heads, kv = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    sizes = (heads * dim, kv * dim, kv * dim)
    tensors = {
        "input_layernorm.weight": layer.attention_norm,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "self_attn.sinks": layer.sinks,
        "self_attn.o_proj.weight": layer.output,
        "self_attn.o_proj.bias": layer.output_bias,
        "mlp.router.weight": layer.router,
        "mlp.router.bias": layer.router_bias,
        "mlp.experts.gate_up_proj_bias": layer.gate_up_bias,
        "mlp.experts.down_proj_bias": layer.down_bias,
    }
    weights, biases = layer.qkv.split(sizes), layer.qkv_bias.split(sizes)
    for name, weight, bias in zip("qkv", weights, biases, strict=True):
        tensors[f"self_attn.{name}_proj.weight"] = weight
        tensors[f"self_attn.{name}_proj.bias"] = bias
    packed = {prefix + name: tensor.detach().bfloat16() for name, tensor in tensors.items()}
    for name, matrix in (("gate_up_proj", layer.gate_up), ("down_proj", layer.down)):
        blocks, scales = mxfp4.quantize(matrix.detach().cpu())
        packed[f"{prefix}mlp.experts.{name}_blocks"] = blocks
        packed[f"{prefix}mlp.experts.{name}_scales"] = scales
    return packed
