"""Builds the KV pool and the worker of one rank from resolved sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss
from chorale.parallel.rank import Rank
from chorale.runtime.adapters import AdapterStore
from chorale.runtime.device import DTYPES, Device
from chorale.runtime.drafts.drafting import Drafting, DraftSetup
from chorale.runtime.offload import PageTransfers
from chorale.runtime.sampling.grammar import GrammarRows
from chorale.runtime.sampling.sampler import Sampler
from chorale.runtime.sizing.graph_sizes import MIXED_TOKENS, MOST_DRAFTING_ROWS
from chorale.runtime.sizing.memory import LEAN_PROMPT_ROWS, PROMPT_ROWS
from chorale.runtime.sizing.resolve import Resolved
from chorale.runtime.steps.buffers import Buffers
from chorale.runtime.steps.decode_graphs import DecodeGraphRunner
from chorale.runtime.steps.graphs import StepParts
from chorale.runtime.steps.mixed_graphs import MixedGraphRunner
from chorale.runtime.worker import Worker


def _allocate_kv(model: ModelConfig, resolved: Resolved, device: Device) -> list[torch.Tensor]:
    """Allocate the KV tensors, [num_blocks + 1, 2, Nkv, block_size, D] each; zeros, as ``AttentionMeta``
    requires. The last block belongs to dummy rows."""
    limits = resolved.limits
    shape = (
        limits.num_blocks + 1,
        2,
        model.num_key_value_heads,
        limits.block_size,
        model.head_dim,
    )
    dtype = DTYPES[resolved.kv_dtype]
    zeros = _untouched_zeros if device.torch_device.type == "cpu" else torch.zeros
    return [zeros(shape, dtype=dtype, device=device.torch_device) for _ in range(model.num_kv_tensors)]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.zeros`` on a CPU, with pages that the system allocates on first use: a pool for the longest
    sequences takes no time at start-up, and no memory before such sequences exist."""
    octets = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(octets).view(dtype).view(shape)


def make_worker(
    model: GptOss,
    resolved: Resolved,
    device: Device,
    grammar: GrammarRows,
    rank: Rank | None = None,
    drafts: DraftSetup | None = None,
    adapters: AdapterStore | None = None,
) -> Worker:
    """Allocate the KV pool and make the worker. ``rank``: the owner of the model's part, if there are several
    ranks. ``drafts``: required if plans have drafts; ``adapters``: if rows have adapters."""
    limits, kv = resolved.limits, _allocate_kv(model.config, resolved, device)
    buffers = Buffers(device, limits)
    if limits.routed_experts is not None and (rank is None or rank.share.is_first):  # all choose the same
        shape = _most_tokens(resolved), *limits.routed_experts
        model.routed = torch.zeros(shape, dtype=torch.uint8, device=device.torch_device)
    sampler = Sampler(
        device,
        limits.vocab_size,
        make_sampler=model.ops.make_sampler,
        rank=None if model.ops.has_whole_logits else rank,
        gather_few=model.ops.gather_few,
        mode=resolved.logprobs_mode,
        row_by_row=resolved.batch_invariant,
    )
    parts = StepParts(device, model, kv, buffers, sampler, adapters)
    drafting = decode_graphs = mixed_graphs = head = None
    if drafts is not None:
        drafting = Drafting(
            drafts,
            parts,
            dtype=DTYPES[resolved.dtype],
            graph_rows=resolved.graph_rows,
            max_len=limits.max_model_len,
        )
        head = drafting.head
    if resolved.graph_rows:
        decode_graphs = DecodeGraphRunner(parts, resolved.graph_rows, limits.max_model_len)
        longest = limits.max_model_len if resolved.mixed_graphs else 0  # 0: mixed steps are not captured
        mixed_graphs = MixedGraphRunner(parts, longest, None if head is None else head.aux_states)
    transfers = None
    if resolved.host_tier is not None:
        pool = [*kv, *(() if head is None else head.kv)]
        sizes = replace(resolved.host_tier, page_bytes=sum(tensor[0].nbytes for tensor in pool))
        transfers = PageTransfers(device, model.ops.page_copies(pool), sizes, limits.num_blocks)
    prompt_rows = LEAN_PROMPT_ROWS if resolved.is_lean else PROMPT_ROWS
    return Worker(parts, grammar, decode_graphs, mixed_graphs, drafting, transfers, prompt_rows)


def _most_tokens(resolved: Resolved) -> int:
    """Return the tokens of the largest step, dummies of captured steps included."""
    limits, drafting = resolved.limits, MOST_DRAFTING_ROWS * (1 + resolved.most_drafts)
    return max(limits.max_num_batched_tokens, *resolved.graph_rows, drafting, *MIXED_TOKENS)
