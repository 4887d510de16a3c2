"""The sizes of the demo model. Torch-free, so that settings can be checked before torch is imported."""

from __future__ import annotations

from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config


def demo_config() -> ModelConfig:
    """Return a small gpt-oss: 6 layers of width 256, 8 experts of which 4 run, the whole vocabulary."""
    return make_config(layers=6, experts=8, hidden=256, inter=256, heads=8, kv_heads=2)
