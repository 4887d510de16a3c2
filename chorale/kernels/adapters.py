"""LoRA adapters in the form that ops read, and the adapters of a step's tokens.

Shape letters are those of ``ops.py``; r is a rank. The scale of an adapter (alpha / r) is part of ``b``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import torch

# What the adapters of a step change. Each value includes those before it: nothing, attention, experts, router
# or head, and a head that replaces the base's.
NONE, ATTENTION, EXPERTS, WHOLE, HEADS = range(5)
_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class LowRank:
    """Adds (x a^T) b^T + bias to outputs ``first`` and following of a product with x [T, K]."""

    a: torch.Tensor  # [r, K]
    b: torch.Tensor  # [N, r]
    bias: torch.Tensor | None = None  # [N]
    first: int = 0


@dataclass(frozen=True, slots=True)
class ExpertLowRank:
    """The same for one product of n of the experts."""

    a: torch.Tensor  # [n, r, K]
    b: torch.Tensor  # [n, N, r]
    places: tuple[int, ...]  # [E] index of each expert in ``a`` and ``b``; -1: the adapter leaves it alone

    def of(self, expert: int) -> LowRank | None:
        place = self.places[expert]
        return None if place < 0 else LowRank(self.a[place], self.b[place])


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """What an adapter adds to the products of one layer. Rows of gate_up alternate gate, up, gate, up, ..."""

    qkv: tuple[LowRank, ...] = ()  # outputs in the order q, k, v, before rotary
    output: LowRank | None = None
    router: LowRank | None = None
    gate_up: ExpertLowRank | None = None
    down: ExpertLowRank | None = None

    @property
    def has_experts(self) -> bool:
        return self.gate_up is not None or self.down is not None


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter: an entry for each layer, and the head: an addition, a whole matrix [V, H], or None."""

    layers: tuple[LayerAdapter, ...]
    head: LowRank | torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Adapter:
        """Return the adapter with each tensor changed."""
        return _mapped(self, change)

    @property
    def reach(self) -> int:
        """What the adapter changes: ``ATTENTION``, ``EXPERTS``, ``WHOLE`` or ``HEADS``."""
        if self.head is not None and not isinstance(self.head, LowRank):
            return HEADS
        if self.head is not None or any(layer.router is not None for layer in self.layers):
            return WHOLE
        return EXPERTS if any(layer.has_experts for layer in self.layers) else ATTENTION

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of(self))


def tensors_of(part: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of an adapter or of a part of one."""
    if is_dataclass(part) and not isinstance(part, type):
        for each in fields(part):
            yield from tensors_of(getattr(part, each.name))
    elif isinstance(part, tuple):
        for item in part:
            yield from tensors_of(item)
    elif hasattr(part, "nbytes"):
        yield cast("torch.Tensor", part)


def _mapped(part: _Part, change: Callable[[torch.Tensor], torch.Tensor]) -> _Part:
    found: Any = part
    if is_dataclass(part) and not isinstance(part, type):
        found = type(part)(**{each.name: _mapped(getattr(part, each.name), change) for each in fields(part)})
    elif isinstance(part, tuple):
        found = tuple(_mapped(item, change) for item in part)
    elif hasattr(part, "nbytes"):
        found = change(found)
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """The adapters of a step in which at least one token has one."""

    slots: torch.Tensor  # [T] int64: the slot of each token's adapter; -1: the base model
    groups: tuple[tuple[Adapter, torch.Tensor], ...]  # each adapter, and the indices of its tokens [n] int64

    def in_layer(self, layer: int) -> list[tuple[LayerAdapter, torch.Tensor]]:
        return [(adapter.layers[layer], rows) for adapter, rows in self.groups]


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """The sizes of adapters' slots in device memory."""

    num_slots: int
    max_rank: int
    dtype: torch.dtype
    num_layers: int
    hidden: int  # H
    query: int  # Nq * D
    key: int  # Nkv * D
    experts: int  # E
    inter: int  # I
    vocab: int  # V


def padded_rank(rank: int) -> int:
    """Return the rank for which a slot has memory: a power of two that tensor cores multiply."""
    return max(16, 1 << (rank - 1).bit_length())


class AdapterSlots(Protocol):
    """Adapters in device memory at fixed addresses. Kernels find an adapter by its slot's number, which a
    device tensor holds, so a graph can run any adapters."""

    def write(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter into a slot that no step uses, on the current stream. Allocates memory only for a
        head that replaces the base's."""
        ...

    def batch(self, slots: torch.Tensor, reach: int) -> Any:
        """Return the adapters of a step, for ``LoraOps``. slots [T] int32: of each token, -1: the base model.

        ``reach``: the largest of the adapters. Runs on the device only.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoraOps:
    """Ops of steps with adapters: those of the same name in ``Ops``, with the step's adapters added.

    ``adapters`` is an ``AdapterBatch``, or with ``make_slots`` the result of ``AdapterSlots.batch``. Tokens
    without an adapter get the results of the plain ops, bit for bit.
    """

    # (..., adapters, layer)
    qkv_rope_cache: Callable[..., torch.Tensor]
    # (..., adapters, layer)
    project_and_route: Callable[..., tuple[torch.Tensor, Any]]
    # (..., adapters, layer)
    moe: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    # (..., adapters)
    lm_head: Callable[..., torch.Tensor]
    # Allocates slots in a device's memory. None: the ops read each adapter's own tensors.
    make_slots: Callable[[SlotSizes, torch.device], AdapterSlots] | None = None
