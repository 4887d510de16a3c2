"""Cuts: the part of a checkpoint's tensor that a rank reads, by the letters of the tensor's shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chorale.model.config import MXFP4_GROUP, ModelConfig
from chorale.model.layouts import TensorSpec
from chorale.parallel.shares import Share


@dataclass(frozen=True, slots=True)
class Cut:
    """Ascending ranges of one dimension of a tensor."""

    dim: int
    ranges: tuple[range, ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.ranges))

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.count, *whole[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of ``tensor``: a view if there is only one range."""
        parts = [tensor.narrow(self.dim, own.start, len(own)) for own in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def spans(self, whole: Sequence[int], item: int) -> tuple[int, int, list[range]]:
        """Return (rows, bytes per row, byte ranges to read of each row) of a tensor in a file."""
        inner = math.prod(whole[self.dim + 1 :]) * item
        rows = math.prod(whole[: self.dim])
        return rows, whole[self.dim] * inner, [range(r.start * inner, r.stop * inner) for r in self.ranges]


def cut_of(spec: TensorSpec, config: ModelConfig, share: Share) -> Cut | None:
    """Returns the part of a tensor that ``share`` owns; None: all of it. ``config``: the whole model's."""
    ranges = _ranges(config, share)
    if not spec.role.startswith(("gate_up", "down")):
        ranges.pop("E")  # the router is not cut
    for dim, letter in enumerate(spec.letters):
        cut = Cut(dim, ranges.get(letter, (range(spec.shape[dim]),)))
        if cut.count < spec.shape[dim]:
            return cut  # a tensor is cut in one dimension at most
    return None


def _ranges(config: ModelConfig, share: Share) -> dict[str, tuple[range, ...]]:
    """Return letter of ``layouts.py`` -> ranges."""
    dim, columns = config.head_dim, share.columns
    query, key_value = _times(share.heads, dim), _times(share.kv_heads, dim)
    keys = config.num_attention_heads * dim  # first row of the keys
    values = keys + config.num_key_value_heads * dim
    return {
        "V": (share.vocabulary,),
        "NQ": (share.heads,),
        "Q": (query,),
        "KV": (key_value,),
        "QKV": (query, _shifted(key_value, keys), _shifted(key_value, values)),
        "E": (share.experts,),
        "I": (columns,),
        "2I": (_times(columns, 2),),
        "I/2": (range(columns.start // 2, columns.stop // 2),),
        "J": (range(columns.start // MXFP4_GROUP, columns.stop // MXFP4_GROUP),),
    }


def _times(some: range, factor: int) -> range:
    return range(some.start * factor, some.stop * factor)


def _shifted(some: range, offset: int) -> range:
    return range(some.start + offset, some.stop + offset)
