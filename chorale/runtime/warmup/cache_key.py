"""What decides which kernels an engine launches, beside the code and the machine: as text, to be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from chorale.model.gpt_oss import GptOss
from chorale.runtime.resolve import Resolved

_ALIGNMENT = 16  # bytes; what kernels are specialised by


def cache_key(model: GptOss, resolved: Resolved) -> str:
    """Sizes of the model and of steps, and how the weights lie in memory.

    Not how many blocks there are: that changes from start to start, and no kernel knows it.
    """
    limits = replace(resolved.limits, num_blocks=0)
    told = [model.ops.name, model.config, limits, resolved.dtype, resolved.kv_dtype]
    told += [resolved.graph_rows, resolved.mixed_graphs]
    return "\n".join([*map(repr, told), *sorted(set(_layouts("weights", model.weights)))])


def _layouts(name: str, found: Any) -> Iterator[str]:
    if isinstance(found, torch.Tensor):
        off = found.data_ptr() % _ALIGNMENT
        yield f"{name}: {found.dtype} {tuple(found.shape)} {found.stride()} {off}"
    elif dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            yield from _layouts(f"{name}.{field.name}", getattr(found, field.name))
    elif isinstance(found, list | tuple):
        for item in found:  # layers are alike: one line tells of all
            yield from _layouts(name, item)
    else:
        yield f"{name}: {found!r}"
