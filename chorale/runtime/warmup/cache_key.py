"""The facts, in addition to code and GPU, that decide which kernels an engine launches, as comparable
text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from chorale.model.gpt_oss import GptOss
from chorale.runtime.sizing.resolve import Resolved

_ALIGNMENT = 16  # bytes; kernels are specialised by it
_LIMITS = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_loras")
_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_local_experts", "num_experts_per_tok", "vocab_size", "sliding_window", "layer_windows"),
)


def cache_key(model: GptOss, resolved: Resolved) -> str:
    """Returns the sizes of model and steps, and the memory layout of the weights.

    Omits settings that no kernel depends on, such as the number of blocks or the seed.
    """
    parts = [model.ops.name, resolved.dtype, resolved.kv_dtype, resolved.graph_rows, resolved.mixed_graphs]
    parts.append(resolved.batch_invariant)
    parts += [f"{name} {getattr(model.config, name)}" for name in _SIZES]
    parts += [f"{name} {getattr(resolved.limits, name)}" for name in _LIMITS]
    return "\n".join([*map(repr, parts), *sorted(set(_layouts("weights", model.weights)))])


def _layouts(name: str, found: Any) -> Iterator[str]:
    if isinstance(found, torch.Tensor):
        offset = found.data_ptr() % _ALIGNMENT
        yield f"{name}: {found.dtype} {tuple(found.shape)} {found.stride()} {offset}"
    elif dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            yield from _layouts(f"{name}.{field.name}", getattr(found, field.name))
    elif isinstance(found, list | tuple):
        for item in found:  # all layers give the same lines
            yield from _layouts(name, item)
    else:  # kernels are not specialised by the value of a float
        yield f"{name}: {'float' if isinstance(found, float) else repr(found)}"
