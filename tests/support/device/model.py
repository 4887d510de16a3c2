"""Helpers of the model tests: loading, prompts, and a comparison of logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chorale.kernels import select_ops
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import Target, load_weights

MakeModel = Callable[..., GptOss]
VOCAB = 512
SMALL: dict[str, Any] = {
    "layers": 4,
    "experts": 8,
    "hidden": 64,
    "inter": 96,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": VOCAB,
}


def load_model(folder: Path, dtype: torch.dtype = torch.float32, max_len: int = 4096) -> GptOss:
    config = ModelConfig.load(folder)
    ops = select_ops("reference", "cpu")
    return GptOss(config, load_weights(folder, Target(config, ops, dtype)), ops, max_len)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def largest_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference of the log-probabilities of two sets of logits or log-probabilities."""
    return float((logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max())
