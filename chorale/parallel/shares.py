"""Shares: the part of the model that each rank of a tensor-parallel engine owns. Pure functions of sizes.

Attention is cut by KV heads and their query heads, the experts by columns of the intermediate size (or, with
expert parallelism, by whole experts), embedding and head by token ids. Nothing is padded: if the chunks do
not divide evenly, some ranks have one chunk more. A rank's part is that of two ranks of twice as many.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

from chorale.config.engine import VALID_SIZES, EngineConfig, check_size
from chorale.errors import ConfigError

CHUNK = 64  # columns and token ids that stay together (grammar masks have eight ids per byte)
MXFP4_GROUP = 32  # columns that share a scale; the chunk size if 64 does not divide the intermediate size


class ModelSizes(Protocol):
    """The sizes of a model that shares depend on; ``model.config.ModelConfig`` has them."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_local_experts(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the model that one rank owns."""

    rank: int
    size: int  # number of ranks
    heads: range  # query heads
    kv_heads: range
    columns: range  # columns of each expert's intermediate size
    experts: range
    vocabulary: range  # token ids: rows of embedding and head
    num_experts: int  # experts of the whole model

    @property
    def by_expert(self) -> bool:
        """Returns whether the ranks have whole experts instead of some columns of every expert."""
        return len(self.experts) < self.num_experts

    @property
    def is_first(self) -> bool:
        """Returns whether this rank adds the terms that must be added once: biases of summed products, and
        x."""
        return self.rank == 0


def cuts_by_expert(config: EngineConfig) -> bool:
    """Returns whether ranks have whole experts instead of some columns of every expert, the default.

    The choice holds for every batch size, because weights are cut when they are read. Whole experts should be
    faster for prompts and large batches, and slower for few rows (predictions: docs/lab/kernels.md). Neither
    was measured on GPUs.
    """
    return bool(config.enable_expert_parallel)


def shares_of(config: EngineConfig, model: ModelSizes) -> tuple[Share, ...]:
    """Returns the share of each rank of an engine. Raises ``ConfigError`` like ``make_shares``."""
    return make_shares(model, config.tensor_parallel_size, by_expert=cuts_by_expert(config))


def make_shares(model: ModelSizes, size: int, *, by_expert: bool = False) -> tuple[Share, ...]:
    """Returns the share of each rank. ``by_expert``: whole experts instead of columns of every expert.

    Raises ``ConfigError`` if the model cannot be cut into ``size`` shares.
    """
    check_size(size)
    kv_heads, inter = model.num_key_value_heads, model.intermediate_size
    if kv_heads % size:
        fitting = [each for each in VALID_SIZES if kv_heads % each == 0]
        raise ConfigError(
            f"--tensor-parallel-size {size}: the model has {kv_heads} KV heads, which {size} ranks cannot "
            f"share; possible: {', '.join(map(str, fitting))}"
        )
    group = model.num_attention_heads // kv_heads
    chunk = MXFP4_GROUP if inter % CHUNK else CHUNK
    whole = range(inter), range(model.num_local_experts)
    columns = [whole[0]] * size if by_expert else cut(inter, size, chunk, "columns of the experts")
    experts = cut(model.num_local_experts, size, 1, "experts") if by_expert else [whole[1]] * size
    vocabulary = vocabulary_shares(model.vocab_size, size)
    each = kv_heads // size
    return tuple(
        Share(
            rank=rank,
            size=size,
            heads=range(rank * each * group, (rank + 1) * each * group),
            kv_heads=range(rank * each, (rank + 1) * each),
            columns=columns[rank],
            experts=experts[rank],
            vocabulary=vocabulary[rank],
            num_experts=model.num_local_experts,
        )
        for rank in range(size)
    )


@dataclass(frozen=True, slots=True)
class FixedSums:
    """The parts of a rank's sums, with which they are the same on any number of ranks: parts are equal on all
    numbers of ranks, and are added in pairs, and so on, over all ranks. Numbers are powers of two."""

    heads: int  # parts of the attention's output
    columns: int  # parts of the experts' columns
    chunk: int  # columns that stay together
    vocab_size: int  # of all ranks


def fixed_sums(config: EngineConfig, model: ModelSizes) -> FixedSums | None:
    """Returns the parts of each rank's sums, or None without ``--batch-invariant``."""
    if not config.batch_invariant:
        return None
    chunk = MXFP4_GROUP if model.intermediate_size % CHUNK else CHUNK
    heads = max(size for size in VALID_SIZES if model.num_key_value_heads % size == 0)
    columns = max(size for size in VALID_SIZES if size <= max(1, -(-model.intermediate_size // chunk)))
    ranks = config.tensor_parallel_size
    return FixedSums(heads // ranks, columns // ranks, chunk, model.vocab_size)


def vocabulary_shares(vocab_size: int, size: int) -> list[range]:
    """Returns the token ids of each rank: adjacent ranges, of which the first is the longest."""
    return cut(vocab_size, size, CHUNK, "token ids")


def cut(total: int, parts: int, chunk: int, what: str) -> list[range]:
    """Cuts ``range(total)`` into parts of complete chunks; only the very last chunk may be shorter.

    45 chunks in 2 parts: 23, 22; in 4: 12, 11, 11, 11. Raises ``ConfigError`` if there are fewer chunks than
    parts.
    """
    chunks = -(-total // chunk)
    if chunks < parts:
        raise ConfigError(f"--tensor-parallel-size {parts}: the model has too few {what} ({total})")
    ends = [0, *itertools.accumulate(chunk * count for count in _halved(chunks, parts))]
    return [range(begin, min(end, total)) for begin, end in itertools.pairwise(ends)]


def _halved(count: int, parts: int) -> list[int]:
    """Returns ``count`` in parts that differ by at most one: halves of halves while ``parts`` is even."""
    if parts % 2 == 0:
        first = -(-count // 2)
        return _halved(first, parts // 2) + _halved(count - first, parts // 2)
    each, more = divmod(count, parts)
    return [each + 1] * more + [each] * (parts - more)
