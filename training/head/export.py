"""Converts a trained head to the archive that ships, and back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from chorale.model.demo.head_archive import NORMS
from training.head.net import MATRICES, HeadNet, HeadShape


def int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int8 [N, H] and the scale of each row, float32."""
    scale = rows.abs().amax(dim=-1).clamp(min=1e-8) / 127
    return torch.round(rows / scale.unsqueeze(-1)).to(torch.int8), scale


def write_head(net: HeadNet, path: Path) -> Path:
    """Writes ``path``, less than 2 MB. Its metadata contains the shape."""
    tensors = {name: getattr(net, name).float() for name in NORMS}
    for name in (*MATRICES, "corrections"):
        tensors[name], tensors[f"{name}_scale"] = int8_rows(getattr(net, name).float())
    tensors["map"] = net.map.bfloat16()
    tensors["draft_ids"], tensors["corrected"] = net.draft_ids.int(), net.corrected.int()
    detached = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = {name: getattr(net.shape, name) for name in HeadShape.__slots__}
    save_file(detached, path, metadata={"shape": json.dumps(shape)})
    return path


def read_head(path: Path, unembedding: torch.Tensor) -> HeadNet:
    """Returns the net of an archive with the same quantisation. ``unembedding`` [V, H]: the target's."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        shape = json.loads(file.metadata()["shape"])
    shape["boundaries"] = tuple(shape["boundaries"])
    ids, corrected = tensors["draft_ids"].long(), tensors["corrected"].long()
    net = HeadNet(HeadShape(**shape), ids, unembedding[ids.to(unembedding.device)].cpu(), corrected)
    with torch.no_grad():
        for name in (*NORMS, "map"):
            getattr(net, name).copy_(tensors[name])
        for name in (*MATRICES, "corrections"):
            getattr(net, name).copy_(tensors[name].float() * tensors[f"{name}_scale"].unsqueeze(-1))
    net.quantise = True
    return net.to(unembedding.device)


def from_published(folder: Path) -> HeadNet:
    """Returns the net of a folder in the speculators format, as ``chorale.model.demo.head_archive`` expands
    it; not quantised."""
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    layer = config["transformer_layer_config"]
    shape = HeadShape(
        hidden_size=layer["hidden_size"],
        num_heads=layer["num_attention_heads"],
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        intermediate_size=layer["intermediate_size"],
        boundaries=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        rope_theta=layer["rope_theta"],
        eps=layer["rms_norm_eps"],
    )
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    net = HeadNet(shape, ids, tensors["lm_head.weight"], ids[:0])
    attention, mlp = "layers.0.self_attn.{}_proj.weight", "layers.0.mlp.{}_proj.weight"
    joined = {
        "fc": ["fc.weight"],
        "qkv": [attention.format(name) for name in "qkv"],
        "output": [attention.format("o")],
        "gate_up": [mlp.format("gate"), mlp.format("up")],
        "down": [mlp.format("down")],
    }
    with torch.no_grad():
        for name, published in (joined | {name: [published] for name, published in NORMS.items()}).items():
            getattr(net, name).copy_(torch.cat([tensors[one].float() for one in published]))
    return net
