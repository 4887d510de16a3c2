"""Draft heads' files, written from the formats' descriptions with the safetensors package, and a plain
forward of them. Nothing here comes from ``chorale``: both sides of a test must not share a mistake."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, DIM, INTER, VOCAB, DRAFT = 64, 8, 2, 16, 80, 512, 200
LAYERS = 4  # of the target
Tensors = dict[str, torch.Tensor]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class HeadFile:
    """One head as it lies on disk: its configuration and its tensors."""

    config: dict[str, Any]
    tensors: Tensors
    prefix: str = "layers.0."  # of the layer's tensors
    num_states: int = 3
    normed_residual: bool = False
    normed_output: bool = False
    angles: Callable[[int], torch.Tensor] = field(default=lambda length: angles_of(length))
    eps: float = 1e-5
    attention_scale: float = 1.0  # of cosines and sines

    def write(self, folder: Path, dtype: torch.dtype = torch.float32, shards: int = 1) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        stored = {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in self.tensors.items()
        }
        if shards == 1:
            save_file(stored, folder / "model.safetensors")
            return folder
        places = {}
        for shard in range(shards):
            name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = dict(list(stored.items())[shard::shards])
            save_file(part, folder / name)
            places |= dict.fromkeys(part, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder


def angles_of(length: int, theta: float = 10000.0, slowed: Callable[[float], float] = float) -> torch.Tensor:
    """[length, D / 2] radians. ``slowed``: frequency -> frequency."""
    frequencies = [slowed(theta ** (-2 * i / DIM)) for i in range(DIM // 2)]
    return torch.tensor([[position * f for f in frequencies] for position in range(length)])


def tensors_of(
    prefix: str, num_states: int = 3, *, seed: int = 0, embedding: bool = True, mapped: bool = True
) -> Tensors:
    """``mapped``: of a part of the vocabulary, with d2t and t2d."""
    draft = DRAFT if mapped else VOCAB
    shapes = {
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, 2 * HIDDEN),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * DIM, 2 * HIDDEN),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * DIM, 2 * HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": (INTER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (INTER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INTER),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (draft, HIDDEN),
    }
    if num_states:
        shapes["fc.weight"] = (HIDDEN, num_states * HIDDEN)
    if embedding:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    found: Tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        normal = randn(*shape, seed=100 * seed + number)
        found[name] = 1 + 0.2 * normal if "norm" in name else normal / math.sqrt(shape[-1])
    if mapped:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT].sort().values
        found["d2t"] = ids - torch.arange(DRAFT)
        found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return found


LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
}


def speculators(**changes: Any) -> HeadFile:
    """As vllm-project/speculators saves a head that was trained with its present defaults."""
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "draft_vocab_size": DRAFT,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "fc_norm": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "transformer_layer_config": {**LLAMA, "rope_theta": 10000.0, "layer_types": ["full_attention"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "acme/tiny-oss", "architectures": ["GptOssForCausalLM"]},
        },
    }
    tensors = tensors_of("layers.0.", seed=1)
    tensors["input_norm.weight"] = 1 + 0.2 * randn(3 * HIDDEN, seed=77)
    return HeadFile(config | changes, tensors, normed_residual=True, normed_output=True)


def specforge(**changes: Any) -> HeadFile:
    """As SpecForge saves one: flat, ``midlayer.``, no norm but the layer's, ids of layers."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
        "draft_vocab_size": DRAFT,
        "tie_word_embeddings": False,
        **LLAMA,
    }
    return HeadFile(config | changes, tensors_of("midlayer.", seed=2), "midlayer.")


def nvidia(**changes: Any) -> HeadFile:
    """As ModelOpt exports NVIDIA's v3: the switch is nested, the last boundary is the target's end, and the
    embedding is the target's."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA,
        "draft_vocab_size": DRAFT,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
            "use_aux_hidden_state": True,
            "norm_before_fc": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
        },
    }
    tensors = tensors_of("layers.0.", seed=3, embedding=False)
    tensors["input_norm.weight"] = 1 + 0.2 * randn(3 * HIDDEN, seed=78)

    def slowed(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength > 64 / 1.0:
            return frequency / 8.0
        if wavelength < 64 / 4.0:
            return frequency
        smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
        return (1 - smooth) * frequency / 8.0 + smooth * frequency

    return HeadFile(config | changes, tensors, angles=lambda n: angles_of(n, 500000.0, slowed))


def final_state(**changes: Any) -> HeadFile:
    """As NVIDIA's short-context head: the target's final state, no fc, no norm of it in the file."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA,
        "draft_vocab_size": DRAFT,
        "eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []},
    }
    tensors = tensors_of("midlayer.", 0, seed=4)
    del tensors["midlayer.hidden_norm.weight"]
    return HeadFile(config | changes, tensors, "midlayer.", num_states=0)


def eagle31(**changes: Any) -> HeadFile:
    """EAGLE 3.1: a norm for each state, the normed sum goes on; four states; ``model.`` before the names."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA,
        "draft_vocab_size": DRAFT,
        "fc_norm": True,
        "norm_output": True,
        "num_aux_hidden_states": 4,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3, 4],
    }
    tensors = tensors_of("midlayer.", 4, seed=5)
    for number in range(4):
        tensors[f"fc_norm.{number}.weight"] = 1 + 0.2 * randn(HIDDEN, seed=60 + number)
    outside = ("lm_head.weight", "d2t", "t2d")
    renamed = {name if name in outside else f"model.{name}": tensor for name, tensor in tensors.items()}
    return HeadFile(config | changes, renamed, "model.midlayer.", num_states=4, normed_output=True)


def full_vocabulary(**changes: Any) -> HeadFile:
    """No d2t, biases of attention, no ids of states, and a plain rope_parameters section."""
    config = {
        "architectures": ["Eagle3LlamaForCausalLM"],
        **LLAMA,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        "attention_bias": True,
    }
    tensors = tensors_of("layers.0.", 3, seed=6, mapped=False)
    for name, width in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM), ("o", HIDDEN)):
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = randn(width, seed=len(tensors))
    return HeadFile(config | changes, tensors, angles=lambda n: angles_of(n, 150000.0))


STYLES = {
    "speculators": speculators,
    "specforge": specforge,
    "nvidia": nvidia,
    "final state": final_state,
    "eagle 3.1": eagle31,
    "full vocabulary": full_vocabulary,
}

# ------------------------------------------------------------------ the forward, from its description


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def states_of(file: HeadFile, aux: torch.Tensor) -> torch.Tensor:
    """aux [T, states * H] -> [T, H]."""
    by_name = {name.removeprefix("model."): tensor for name, tensor in file.tensors.items()}
    if "input_norm.weight" in by_name:
        aux = rms(aux, by_name["input_norm.weight"], file.eps)
    if "fc_norm.0.weight" in by_name:
        pieces = aux.split(HIDDEN, dim=1)
        aux = torch.cat([rms(p, by_name[f"fc_norm.{n}.weight"], file.eps) for n, p in enumerate(pieces)], 1)
    return aux @ by_name["fc.weight"].t() if file.num_states else aux


def run_layer(
    file: HeadFile, prefix: str, x: torch.Tensor, inputs: torch.Tensor, keys: torch.Tensor, hidden: Any
) -> torch.Tensor:
    """x after a layer. ``inputs``: of q. ``keys`` [K, ...]: inputs of k and v at positions 0 to K - 1; those
    of x are the last. ``hidden`` [T, K]: -inf where a query does not see a key."""
    tensors = file.tensors

    def heads(name: str, inputs: torch.Tensor) -> torch.Tensor:
        product = inputs @ tensors[f"{prefix}self_attn.{name}_proj.weight"].t()
        bias = tensors.get(f"{prefix}self_attn.{name}_proj.bias")
        found = (product if bias is None else product + bias).view(len(inputs), -1, DIM)
        norm = tensors.get(f"{prefix}self_attn.{name}_norm.weight")
        return found if norm is None else rms(found, norm, file.eps)

    def rotated(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(heads[..., : DIM // 2], heads[..., DIM // 2 :]) * turns
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    turns = torch.polar(torch.tensor(1.0), file.angles(len(keys)))[:, None] * file.attention_scale
    q = rotated(heads("q", inputs), turns[len(keys) - len(x) :])
    group = HEADS // KV_HEADS
    k = rotated(heads("k", keys), turns).repeat_interleave(group, dim=1)
    v = heads("v", keys).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM) + hidden
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1)
    x = x + heads("o", attended).reshape(len(x), -1)
    t = rms(x, tensors[f"{prefix}post_attention_layernorm.weight"], file.eps)
    gate, up = (t @ tensors[f"{prefix}mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
    return x + (gate / (1 + (-gate).exp()) * up) @ tensors[f"{prefix}mlp.down_proj.weight"].t()


def forward(
    file: HeadFile, states: torch.Tensor, token_ids: torch.Tensor, embedding: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sums before the final norm [T, H], logits [T, draft V], states of the next draft step [T, H])"""
    by_name = {name.removeprefix("model."): tensor for name, tensor in file.tensors.items()}
    length = len(states)
    e = rms(embedding[token_ids], file.tensors[f"{file.prefix}input_layernorm.weight"], file.eps)
    ones = torch.ones(HIDDEN)
    hn = rms(states, file.tensors.get(f"{file.prefix}hidden_norm.weight", ones), file.eps)
    x = hn if file.normed_residual else states
    both, future = torch.cat((e, hn), dim=1), torch.full((length, length), -math.inf).triu(1)
    x = run_layer(file, file.prefix, x, both, both, future)
    normed = rms(x, by_name["norm.weight"], file.eps)
    return x, normed @ by_name["lm_head.weight"].t(), normed if file.normed_output else x
