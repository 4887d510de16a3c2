"""Writes draft heads in the format of speculators, or of DFlash, with given tensors or random ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from chorale.model.draft.config import HeadConfig
from chorale.model.draft.files import D2T, T2D, names_of
from chorale.model.draft.random_head import random_tensors, random_token_ids


def write_random_head(
    folder: str | Path,
    config: HeadConfig,
    *,
    seed: int = 0,
    embedding: bool = True,
) -> Path:
    """Writes the head that ``random_head`` creates from the same seed. ``embedding``: the file contains one,
    and an output matrix if the head is DFlash's, whose published heads have neither."""
    tensors = random_tensors(config, seed)
    if not embedding:
        del tensors["embedding"]
        tensors = {role: t for role, t in tensors.items() if (role, config.kind) != ("head", "dflash")}
    return write_head(folder, config, tensors, random_token_ids(config, seed))


def write_head(
    folder: str | Path,
    config: HeadConfig,
    tensors: Mapping[str, torch.Tensor],
    token_ids: torch.Tensor,
) -> Path:
    """Writes ``config.json`` and ``model.safetensors`` to ``folder``. ``tensors`` by role (``pack.py``);
    ``token_ids`` [draft V]: the target id of each draft id."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    names = names_of(config)
    for role, tensor in tensors.items():
        parts = list(tensor) if role == "aux_norm" else [tensor]  # [parts, width]
        for name, part in zip(names[role], parts, strict=True):
            stored[name] = part.cpu().contiguous()
    if config.draft_vocab_size != config.vocab_size:
        stored[D2T] = token_ids - torch.arange(len(token_ids))
        stored[T2D] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head_json(config), indent=1))
    return folder


def head_json(config: HeadConfig) -> dict[str, Any]:
    """Returns ``config.json`` of a head with plain rotary embedding."""
    layer = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
    }
    switches = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.aux_norms,
        "norm_output": config.norm_output,
    }
    common = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
    }
    uses_aux = bool(config.aux_boundaries)
    if config.kind == "dflash":
        layers = [b - 1 for b in config.aux_boundaries]
        own = {"mask_token_id": config.mask_token, "target_layer_ids": layers}
        size = {} if config.most_drafts is None else {"block_size": config.most_drafts}
        named = {"architectures": ["DFlashDraftModel"], "dtype": "bfloat16", "dflash_config": own}
        return layer | {"model_type": "qwen3"} | common | size | named
    if config.kind == "peagle":
        common["ptd_token_id"] = config.mask_token
    aux = {"eagle_aux_hidden_state_layer_ids": list(config.aux_boundaries)} if uses_aux else {}
    return {
        "architectures": ["PEagleDraftModel" if config.kind == "peagle" else "Eagle3DraftModel"],
        "speculators_model_type": config.kind,
        "dtype": "bfloat16",
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": config.kind},
        **common,
        **switches,
        **(aux or {"use_aux_hidden_state": False}),
    }
