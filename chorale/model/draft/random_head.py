"""Draft heads with random weights, for tests and benchmarks. The same seed gives the same head."""

from __future__ import annotations

import math

import torch

from chorale.kernels.ops import Ops
from chorale.model.draft.config import HeadConfig, tensor_shapes
from chorale.model.draft.head import DraftHead
from chorale.model.draft.pack import pack_weights


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
    """``embedding``: the target's, if the head has none. Weights are rounded to bfloat16, as in a file."""
    tensors = random_tensors(config, seed, device)
    if embedding is not None:
        tensors["embedding"] = embedding
    token_ids = random_token_ids(config, seed).to(device)
    weights = pack_weights(config, tensors.get, token_ids, ops, dtype)
    return DraftHead(config, weights, ops, max_len)


def random_tensors(
    config: HeadConfig, seed: int = 0, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """bfloat16 tensors by role. Activations stay of order one at any width."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        role: _drawn(role, shape, generator, torch.device(device))
        for role, shape in tensor_shapes(config).items()
    }


def _drawn(
    role: str, shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    normal = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    if role.endswith("norm"):
        return (1.0 + 0.1 * normal).bfloat16()
    return (normal if role == "embedding" else normal / math.sqrt(shape[-1])).bfloat16()


def random_token_ids(config: HeadConfig, seed: int = 0) -> torch.Tensor:
    """[draft V] int64: some of the target's ids, in rising order as in published heads."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    return chosen.sort().values


def differences(token_ids: torch.Tensor) -> torch.Tensor:
    """``d2t`` of files: the target id of each draft id, less the draft id."""
    return token_ids - torch.arange(len(token_ids), device=token_ids.device)


def kept(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """``t2d`` of files: [V] bool, whether a target id has a draft id."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=token_ids.device)
    mask[token_ids] = True
    return mask
