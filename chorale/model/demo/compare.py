"""Whether a checkpoint is the demo, and as it was shipped."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.demo import ARCHIVE, SHA256
from chorale.model.demo.archive import check_hash
from chorale.model.demo.shape import demo_config


def is_demo(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Returns whether it is the demo, though tensors of it may have changed."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_local_experts", "vocab_size")
    if any(getattr(config, name) != getattr(demo_config(), name) for name in names):
        return False
    norm = load_file(ARCHIVE)["model.norm.weight"]
    return torch.equal(checkpoint.read(None, "final_norm"), norm)


def changed_tensors(checkpoint: Checkpoint) -> list[str]:
    """Returns the names of the demo's tensors that are not the archive's, without its tables, which are
    computed when it is expanded. Raises ``CheckpointError`` for another archive."""
    check_hash(ARCHIVE, SHA256)
    here = {name: file for file in checkpoint.files for name in file.entries}
    return [
        name
        for name, tensor in load_file(ARCHIVE).items()
        if not name.startswith("demo.") and not (name in here and _is_same(here[name].tensor(name), tensor))
    ]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_alike = one.shape == other.shape and one.dtype == other.dtype
    return is_alike and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
