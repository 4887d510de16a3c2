"""Draft heads with random weights, for tests and benchmarks. The same seed gives the same head."""

from __future__ import annotations

import math

import torch

from chorale.kernels.ops import Ops
from chorale.model.draft.config import HeadConfig, tensor_shapes
from chorale.model.draft.head import DraftHead
from chorale.model.draft.pack import pack_weights

_DRAWN_AT_ONCE = 2**22  # float32 normals, 16 MB


def random_head(
    config: HeadConfig,
    ops: Ops,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    max_len: int | None = None,
    embedding: torch.Tensor | None = None,
) -> DraftHead:
    """Return a head. ``embedding``: the target's, if the head has none. Weights are rounded to bfloat16, as
    in files."""
    tensors = random_tensors(config, seed, device)
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding
    token_ids = random_token_ids(config, seed).to(device)
    weights = pack_weights(config, tensors.get, token_ids, ops, dtype)
    return DraftHead(config, weights, ops, max_len)


def random_tensors(
    config: HeadConfig, seed: int = 0, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """Return bfloat16 tensors by name, scaled so that activations stay of order one at any width."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: _drawn(name, shape, generator, torch.device(device))
        for name, shape in tensor_shapes(config).items()
    }


def _drawn(
    name: str, shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    is_norm = "norm" in name
    scale = 0.1 if is_norm else 1.0 if name == "embed_tokens.weight" else 1 / math.sqrt(shape[-1])
    for chunk in out.view(-1).split(_DRAWN_AT_ONCE):
        drawn = torch.randn(chunk.shape, generator=generator, device=device) * scale
        chunk.copy_(drawn + 1.0 if is_norm else drawn)
    return out


def random_token_ids(config: HeadConfig, seed: int = 0) -> torch.Tensor:
    """Return [draft V] int64: some of the target's ids, ascending as in published heads."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    return chosen.sort().values
