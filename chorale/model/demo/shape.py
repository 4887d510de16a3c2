"""The sizes of the demo model. Torch-free, so that settings can be checked before torch is imported."""

from __future__ import annotations

from chorale.harmony.vocab import VOCAB_SIZE
from chorale.model.config import ModelConfig, RopeConfig


def demo_config() -> ModelConfig:
    """Return a small gpt-oss: 6 layers of width 256, 8 experts of which 4 run, the whole vocabulary."""
    return ModelConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=4,
        vocab_size=VOCAB_SIZE,
        sliding_window=128,
        rope=RopeConfig(),
        layer_types=("sliding_attention", "full_attention") * 3,
    )
