"""Defaults for GPUs by the memory that they have left beside the weights. Torch-free.

``resolve`` takes the first economy with which the KV pool has room for a long request.
"""

from __future__ import annotations

from dataclasses import dataclass

from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.model.config import ModelConfig
from chorale.runtime.sizing.graph_sizes import MOST_DRAFTING_ROWS, context_sizes, draft_sizes
from chorale.runtime.sizing.memory import (
    LEAN_RESERVE,
    LOGIT_ROWS,
    graph_bytes,
    lean_step_bytes,
    processor_bytes,
)


@dataclass(frozen=True, slots=True)
class Economy:
    """``tokens`` and ``seqs``: defaults of --max-num-batched-tokens and --max-num-seqs. ``is_lean``: only
    decode steps are captured, the workspace is computed closely instead of generously, and the input
    embedding stays in host memory if that is possible."""

    tokens: int
    seqs: int
    is_lean: bool = False


USUAL = Economy(8192, 1024)
ECONOMIES = (USUAL, Economy(2048, 256), Economy(512, 16, is_lean=True))
EMBEDDING = "embedding"  # of --cpu-offload-params


def has_host_embedding(config: EngineConfig, economy: Economy, *, can_gather: bool) -> bool:
    """Returns whether the input embedding stays in host memory. Raises ``ConfigError`` if this is requested
    and not supported. ``can_gather``: kernels can read host memory."""
    asked = config.cpu_offload_params
    why = ""
    if config.tensor_parallel_size > 1:
        why = "not with several ranks"
    elif config.speculative_config is not None and config.speculative_config.has_head:
        why = "not with a draft head, which reads the embedding too"
    elif not can_gather:
        why = "needs a GPU and its Triton kernels"
    if asked is None:
        return economy.is_lean and not why
    if "none" in asked or not asked:
        return False
    if why:
        raise ConfigError(f"--cpu-offload-params {' '.join(asked)}: {why}")
    return True


def lean_bytes(
    config: EngineConfig, model: ModelConfig, tokens: int, seqs: int, graph_rows: tuple[int, ...], blocks: int
) -> int:
    """Return the bytes that a GPU needs beside weights and pool with small steps. ``blocks``: those of the
    longest sequence."""
    drafts = config.speculative_config
    most = 0 if drafts is None else drafts.num_speculative_tokens
    longest = config.max_model_len or model.max_position_embeddings
    graphs = 2 * sum(len(context_sizes(rows, longest)) for rows in graph_rows)  # with and without filters
    for rows in (size for size in graph_rows if most and size <= MOST_DRAFTING_ROWS):
        graphs += 2 * sum(len(context_sizes(rows * (1 + size), longest)) for size in draft_sizes(most))
    return (
        LEAN_RESERVE
        + lean_step_bytes(model, max(tokens, seqs), min(seqs * (1 + most), LOGIT_ROWS))
        + graph_bytes(model, graph_rows[-1] * (1 + most) if graph_rows else 0, graphs, blocks)
        + processor_bytes(model, seqs)
        + longest * model.head_dim * 4  # the rotary table
    )
