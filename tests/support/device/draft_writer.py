"""Writes draft heads in the published formats: with given tensors, or with random ones at any size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from chorale.model.config import RopeConfig
from chorale.model.draft.config import HeadConfig
from chorale.model.draft.files import D2T, T2D, names_of
from chorale.model.draft.random_head import random_tensors, random_token_ids

Style = Literal["speculators", "midlayer"]
STYLES: tuple[Style, ...] = ("speculators", "midlayer")


def write_random_head(
    folder: str | Path,
    config: HeadConfig,
    *,
    style: Style = "speculators",
    seed: int = 0,
    device: str = "cpu",
    embedding: bool = True,
) -> Path:
    """Writes the head that ``random_head`` creates from the same seed. ``device`` generates the numbers.
    ``embedding``: the file contains one, and an output matrix if the head is DFlash's, whose published heads
    have neither. DFlash's has only one style, that of its authors."""
    tensors = random_tensors(config, seed, device)
    if not embedding:
        del tensors["embedding"]
        tensors = {role: t for role, t in tensors.items() if (role, config.kind) != ("head", "dflash")}
    return write_head(folder, config, tensors, random_token_ids(config, seed), style=style)


def write_head(
    folder: str | Path,
    config: HeadConfig,
    tensors: Mapping[str, torch.Tensor],
    token_ids: torch.Tensor,
    *,
    style: Style = "speculators",
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
            stored[_spelled(name, style)] = part.cpu().contiguous()
    if config.draft_vocab_size != config.vocab_size:
        stored[D2T] = token_ids - torch.arange(len(token_ids))
        stored[T2D] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head_json(config, style), indent=1))
    return folder


def _spelled(name: str, style: Style) -> str:
    return name.replace("layers.0.", "midlayer.") if style == "midlayer" else name


def head_json(config: HeadConfig, style: Style) -> dict[str, Any]:
    """Returns ``config.json``. Raises ``ValueError`` for scaled rotary embedding, which is only read."""
    if not isinstance(config.rope, RopeConfig) or config.rope.factor != 1.0:
        raise ValueError("only plain rotary embedding can be written")
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
    if style == "midlayer":
        aux = {"use_aux_hidden_state": uses_aux, "eagle_aux_hidden_state_layer_ids": _ids(config)}
        named = {"architectures": ["LlamaForCausalLMEagle3"], "dtype": "bfloat16"}
        return named | layer | common | switches | {"eagle_config": aux}
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


def _ids(config: HeadConfig) -> list[int]:
    """Returns the ids that ``aux.py`` reads as these boundaries in the flat format."""
    boundaries = list(config.aux_boundaries)
    if boundaries[:1] == [1]:
        raise ValueError("boundaries from 1 would be read as layers; use the style speculators")
    return [b - 1 for b in boundaries] if boundaries[:1] == [2] else boundaries
