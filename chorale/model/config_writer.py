"""Makes ``config.json`` and ``generation_config.json`` of a checkpoint: the inverse of config.py."""

from __future__ import annotations

from typing import Any

from chorale.model.config import ModelConfig, RopeConfig
from chorale.model.layouts import Layout
from chorale.model.quantization import quark_json

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": 199998,
    "do_sample": True,
    "eos_token_id": [200002, 199999, 200012],
    "pad_token_id": 199999,
}

SHAPES: dict[str, dict[str, Any]] = {
    "20b": {"layers": 24, "experts": 32, "hidden": 2880, "inter": 2880, "heads": 64, "kv_heads": 8},
    "120b": {"layers": 36, "experts": 128, "hidden": 2880, "inter": 2880, "heads": 64, "kv_heads": 8},
}
# nvidia/gpt-oss-puzzle-88B: the 120b with half of the experts in half of the layers, and 8 of the 18 layers
# with full attention limited to 8,192 tokens. A checkpoint's own config.json decides what is served.
_HALVED = (15, 17, 19, *range(21, 36))
_WINDOW_8192 = (3, 5, 21, 23, 27, 31, 33, 35)
SHAPES["puzzle-88b"] = SHAPES["120b"] | {
    "layer_experts": tuple(64 if i in _HALVED else 128 for i in range(36)),
    "layer_windows": tuple((8192 if i in _WINDOW_8192 else 0) if i % 2 else 128 for i in range(36)),
    "rope": RopeConfig(factor=56.0),
}


def make_config(
    *,
    layers: int,
    experts: int,
    hidden: int,
    inter: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 64,
    vocab: int = 201088,
    sliding_window: int = 128,
    experts_per_token: int = 4,
    layer_types: tuple[str, ...] | None = None,
    layer_experts: tuple[int, ...] = (),
    layer_windows: tuple[int, ...] = (),
    rope: RopeConfig | None = None,
) -> ModelConfig:
    """Return a gpt-oss configuration of any size. Even layers are windowed unless ``layer_types`` is
    given."""
    kinds = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(layers))
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_local_experts=experts,
        num_experts_per_tok=experts_per_token,
        vocab_size=vocab,
        sliding_window=sliding_window,
        layer_types=layer_types or kinds,
        layer_experts=layer_experts,
        layer_windows=layer_windows,
        rope=rope or RopeConfig(),
    )


def config_json(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Returns the contents of ``config.json`` in the published, the dense or the reference layout."""
    return _reference_json(config) if layout == "reference" else _published_json(config, layout)


def _reference_json(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": config.num_hidden_layers,
        "num_experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "swiglu_limit": config.swiglu_limit,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "sliding_window": config.sliding_window,
        "initial_context_length": config.rope.original_max_position,
        "rope_theta": config.rope.theta,
        "rope_scaling_factor": config.rope.factor,
        "rope_ntk_alpha": config.rope.beta_slow,
        "rope_ntk_beta": config.rope.beta_fast,
    }


def _published_json(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    rope = config.rope
    raw: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": config.num_experts_per_tok,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initial_context_length": rope.original_max_position,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "gpt_oss",
        "num_attention_heads": config.num_attention_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_local_experts": config.num_local_experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
            "rope_type": "yarn",
            "truncate": rope.truncate,
        },
        "rope_theta": rope.theta,
        "sliding_window": config.sliding_window,
        "swiglu_limit": config.swiglu_limit,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    attention = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    untouched = [*attention, "model.embed_tokens", "lm_head"]
    if config.layer_experts:
        raw |= {"architectures": ["GptOssPuzzleForCausalLM"], "model_type": "gpt_oss_puzzle"}
        windows = [window or None for window in config.layer_windows]
        raw["layer_types"] = [f"{'sliding' if window else 'full'}_attention" for window in windows]
        raw["block_configs"] = [
            {"num_local_experts": experts, "sliding_window": window}
            for experts, window in zip(config.layer_experts, windows, strict=True)
        ]
        del raw["num_local_experts"], raw["sliding_window"]
    if layout == "published":
        raw["quantization_config"] = {"modules_to_not_convert": untouched, "quant_method": "mxfp4"}
    elif layout == "quark":
        raw["quantization_config"] = quark_json(untouched)
    return raw
