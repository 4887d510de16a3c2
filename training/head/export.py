"""From a trained head to the archive that ships, and back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from training.head.net import MATRICES, HeadNet, HeadShape

NORMS = ("input_norm", "embed_norm", "hidden_norm", "mlp_norm", "norm")


def int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [N, H] and the scale of each row, float32."""
    scale = rows.abs().amax(dim=-1).clamp(min=1e-8) / 127
    return torch.round(rows / scale.unsqueeze(-1)).to(torch.int8), scale


def write_head(net: HeadNet, path: Path) -> Path:
    """Write ``path``; below 2 MB. The shape is in its metadata."""
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
    """The net of an archive, quantised as it was. ``unembedding`` [V, H]: the target's."""
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
