"""TritonSlots: the memory of adapters' slots, one pair of tensors for each kind of product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorale.kernels.adapters import Adapter, ExpertLowRank, LayerAdapter, LowRank, SlotSizes, padded_rank
from chorale.kernels.triton.dense.linear import Linear, pack_head
from chorale.kernels.triton.lora.kernels import Rows
from chorale.kernels.triton.moe.sort import sort_pairs

# The products that an adapter changes: their parts in ``TritonSlots.ranks``.
QKV, OUTPUT, ROUTER = slice(0, 3), slice(3, 4), slice(4, 5)
GATE_UP, DOWN, HEAD = slice(5, 6), slice(6, 7), slice(7, 8)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The matrices of one kind of product in all slots. L layers, S slots; R: ``padded_rank``."""

    a: torch.Tensor  # [L, S, (E,) R, K]
    b: torch.Tensor  # [L, S, (E,) N, R]
    bias: torch.Tensor | None = None  # [L, S, N]


class TritonSlots:
    """``AdapterSlots``. What lies beyond an adapter's own rank is never read."""

    def __init__(self, sizes: SlotSizes, device: torch.device) -> None:
        self._sizes = sizes
        rank = padded_rank(sizes.max_rank)
        layers, hidden, experts = sizes.num_layers, sizes.hidden, sizes.experts
        qkv = sizes.query + 2 * sizes.key

        def pairs(depth: int, width: int, *outer: int, parts: int = 1, over: int = layers) -> Pairs:
            def room(*shape: int) -> torch.Tensor:
                return torch.empty(over, sizes.num_slots, *shape, dtype=sizes.dtype, device=device)

            bias = None if outer else room(width)
            return Pairs(room(*outer, parts * rank, depth), room(*outer, width, rank), bias)

        self.pairs = {
            QKV.start: pairs(hidden, qkv, parts=3),
            OUTPUT.start: pairs(sizes.query, hidden),
            ROUTER.start: pairs(hidden, experts),
            GATE_UP.start: pairs(hidden, 2 * sizes.inter, experts),
            DOWN.start: pairs(sizes.inter, hidden, experts),
            HEAD.start: pairs(hidden, sizes.vocab, over=1),
        }
        self.heads: dict[int, Linear] = {}  # of slots whose adapters replace the base's
        # [L, parts, S] int32; 0: the adapter leaves the product alone. The head's are in layer 0.
        self.ranks = torch.zeros(layers, 8, sizes.num_slots, dtype=torch.int32, device=device)

    # ------------------------------------------------------------------ AdapterSlots

    def write(self, slot: int, adapter: Adapter) -> None:
        self.heads.pop(slot, None)
        if isinstance(adapter.head, torch.Tensor):
            self.heads[slot] = pack_head(adapter.head.to(self.ranks.device, self._sizes.dtype))
        ranks = torch.zeros(self.ranks.shape[:2], dtype=torch.int32)
        for layer, own in enumerate(adapter.layers):
            self._write_layer(layer, slot, own, ranks[layer])
        if isinstance(adapter.head, LowRank):
            ranks[0, HEAD] = self._write_part(HEAD, 0, slot, adapter.head)
        self.ranks[:, :, slot].copy_(ranks)

    def batch(self, slots: torch.Tensor, reach: int) -> SlotBatch:
        return SlotBatch(self, slots, self.rows_of(slots), reach)

    # ------------------------------------------------------------------ steps

    def of_layer(
        self, part: slice, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return a, b, bias and ranks [parts, S] of a product in all slots."""
        pairs = self.pairs[part.start]
        bias = None if pairs.bias is None else pairs.bias[layer]
        return pairs.a[layer], pairs.b[layer], bias, self.ranks[layer, part]

    def rows_of(self, slots: torch.Tensor) -> Rows:
        """Return the tokens of slots [T] int32, sorted by slot."""
        count = self._sizes.num_slots
        keys = torch.where(slots < 0, count, slots).long()
        return Rows(*sort_pairs(keys[:, None], count + 1), count)

    def pairs_of(self, slots: torch.Tensor, ids: torch.Tensor) -> Rows:
        """Return the (token, expert) pairs of ids [T, K] int64, sorted by slot and expert."""
        count, experts = self._sizes.num_slots, self._sizes.experts
        wide = slots.long()[:, None]
        keys = torch.where(wide < 0, count * experts, wide * experts + ids)
        return Rows(*sort_pairs(keys, count * experts + 1), count, experts)

    def _write_layer(self, layer: int, slot: int, own: LayerAdapter, ranks: torch.Tensor) -> None:
        bounds = (self._sizes.query, self._sizes.query + self._sizes.key)
        for part in own.qkv:
            which = sum(part.first >= bound for bound in bounds)
            ranks[which] = self._write_part(QKV, layer, slot, part, which)
        for kind, given in ((OUTPUT, own.output), (ROUTER, own.router)):
            if given is not None:
                ranks[kind] = self._write_part(kind, layer, slot, given)
        for kind, stacked in ((GATE_UP, own.gate_up), (DOWN, own.down)):
            if stacked is not None:
                ranks[kind] = _write_experts(self.pairs[kind.start], layer, slot, stacked)

    def _write_part(self, kind: slice, layer: int, slot: int, part: LowRank, which: int = 0) -> int:
        """Returns the rank."""
        pairs = self.pairs[kind.start]
        rank, end = len(part.a), part.first + len(part.b)
        begin = which * pairs.b.shape[-1]
        _copy(pairs.a[layer, slot, begin : begin + rank], part.a)
        _copy(pairs.b[layer, slot, part.first : end, :rank], part.b)
        assert pairs.bias is not None
        bias = pairs.bias[layer, slot, part.first : end]
        if part.bias is None:
            bias.zero_()
        else:
            _copy(bias, part.bias)
        return rank


def _write_experts(pairs: Pairs, layer: int, slot: int, stacked: ExpertLowRank) -> int:
    """Returns the rank. Experts that the adapter leaves alone get zeros."""
    rank = stacked.a.shape[1]
    a, b = pairs.a[layer, slot, :, :rank], pairs.b[layer, slot, :, :, :rank]
    if stacked.places == tuple(range(len(a))):
        _copy(a, stacked.a)
        _copy(b, stacked.b)
        return rank
    a.zero_()
    b.zero_()
    chosen = [(expert, place) for expert, place in enumerate(stacked.places) if place >= 0]
    experts, places = (list(each) for each in zip(*chosen, strict=True))
    a[experts] = stacked.a[places].to(a.device, a.dtype)
    b[experts] = stacked.b[places].to(b.device, b.dtype)
    return rank


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source.to(target.device))


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """The adapters of a step's tokens."""

    adapters: TritonSlots
    slots: torch.Tensor  # [T] int32: of each token, -1: no adapter
    rows: Rows  # the tokens
    reach: int  # what some of them change
