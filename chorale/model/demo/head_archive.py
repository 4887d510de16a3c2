"""Expands the small archive of the demo's draft head to an ordinary EAGLE3 folder in the speculators format.

The archive holds int8 rows with scales; their product with the demo's unembedding is the head's unembedding
(see ``training/head`` in the repository). The embedding is the demo's and is not written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from chorale.harmony.vocab import VOCAB_SIZE
from chorale.model.demo.archive import save_tensors
from chorale.model.demo.shape import demo_config

NORMS = {
    "input_norm": "input_norm.weight",
    "embed_norm": "layers.0.input_layernorm.weight",
    "hidden_norm": "layers.0.hidden_norm.weight",
    "mlp_norm": "layers.0.post_attention_layernorm.weight",
    "norm": "norm.weight",
}


def expand_head(archive: Path, demo: Path, folder: Path) -> None:
    """Write config.json and model.safetensors into ``folder`` (config.json last). ``demo``: the demo's
    folder."""
    with safe_open(archive, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        shape = json.loads(file.metadata()["shape"])
    with safe_open(demo / "model.safetensors", "pt") as file:
        unembedding = file.get_tensor("lm_head.weight")[tensors["draft_ids"].long()]
    folder.mkdir(parents=True, exist_ok=True)
    named = head_tensors(tensors, unembedding, shape)
    save_tensors(named, folder / "model.safetensors")
    config = head_config(shape, len(tensors["draft_ids"]))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def head_tensors(
    tensors: dict[str, torch.Tensor], unembedding: torch.Tensor, shape: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return bfloat16 tensors by published name. ``unembedding`` [Vd, H]: the demo's rows of the draft
    vocabulary."""

    def rows(name: str) -> torch.Tensor:
        return tensors[name].float() * tensors[f"{name}_scale"].unsqueeze(-1)

    queries, keys = (shape[name] * shape["head_dim"] for name in ("num_heads", "num_kv_heads"))
    q, k, v = rows("qkv").split((queries, keys, keys))
    gate, up = rows("gate_up").chunk(2)
    head = unembedding.float() @ tensors["map"].float()
    head.index_add_(0, tensors["corrected"].long(), rows("corrections"))
    made = {published: tensors[name] for name, published in NORMS.items()}
    made |= {
        f"layers.0.self_attn.{name}_proj.weight": one for name, one in zip("qkv", (q, k, v), strict=True)
    }
    made |= {"layers.0.mlp.gate_proj.weight": gate, "layers.0.mlp.up_proj.weight": up}
    made |= {
        "layers.0.self_attn.o_proj.weight": rows("output"),
        "layers.0.mlp.down_proj.weight": rows("down"),
    }
    made |= {"fc.weight": rows("fc"), "lm_head.weight": head}
    packed = {name: tensor.bfloat16().contiguous() for name, tensor in made.items()}
    draft_ids = tensors["draft_ids"].long()
    packed["d2t"] = draft_ids - torch.arange(len(draft_ids))
    packed["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, draft_ids, True)
    return packed


def head_config(shape: dict[str, Any], draft_vocab_size: int) -> dict[str, Any]:
    """Return ``config.json`` as the speculators library writes it."""
    target = demo_config()
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": shape["boundaries"],
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": shape["hidden_size"],
            "num_attention_heads": shape["num_heads"],
            "num_key_value_heads": shape["num_kv_heads"],
            "head_dim": shape["head_dim"],
            "intermediate_size": shape["intermediate_size"],
            "num_hidden_layers": 1,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "rms_norm_eps": shape["eps"],
            "rope_theta": shape["rope_theta"],
            "hidden_act": "silu",
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "demo", "architectures": ["GptOssForCausalLM"]},
        },
    }
