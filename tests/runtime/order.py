"""Order: what must have happened before what, on streams that are only simulated.

Work is done at once, in the order of the program. Each stream counts its accesses, and knows of how many of
the other streams' accesses it has waited for, by events. Two accesses to one page, of which one writes, must
be in an order that events guarantee.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chorale.kernels.reference.pages import ReferencePageCopies
from chorale.runtime.device import CpuDevice
from chorale.runtime.streams import Event, Stream
from tests.support.runtime import CPU

Key = tuple[str, int]
MAIN, LOADS = 0, 2  # the order in which ``PageTransfers`` makes its streams


class Order(TorchDispatchMode):
    """Watches the copies of tensors that it knows. Raises AssertionError for two without an order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.current = MAIN
        self.num_streams = 1
        self.num_checked = 0
        self.knows: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._last_write: dict[Key, tuple[int, int]] = {}
        self._reads: defaultdict[Key, dict[int, int]] = defaultdict(dict)
        self._known: list[tuple[int, int, int, str, int]] = []  # begin, end, bytes a page, name, first page
        self._num_pages: defaultdict[str, int] = defaultdict(int)

    def know(self, pages: torch.Tensor, name: str) -> None:
        begin = pages.data_ptr()
        first = self._num_pages[name]
        self._known.append((begin, begin + pages.nbytes, pages[0].nbytes, name, first))
        self._num_pages[name] += len(pages)

    def use(self, key: Key, *, writes: bool) -> None:
        """The current stream reads or writes a page."""
        own, stream = self.knows[self.current], self.current
        own[stream] += 1
        before = [self._last_write[key]] if key in self._last_write else []
        if writes:
            before += self._reads.pop(key, {}).items()
            self._last_write[key] = (stream, own[stream])
        else:
            self._reads[key][stream] = own[stream]
        for other, count in before:
            self.num_checked += 1
            assert own[other] >= count, f"stream {stream} uses {key}, which stream {other} may still use"

    def use_pages(self, tensor: torch.Tensor, *, writes: bool) -> None:
        for begin, end, size, name, first in self._known:
            if begin <= tensor.data_ptr() < end:
                page = (tensor.data_ptr() - begin) // size
                for each in range(page, page + -(-tensor.nbytes // size)):
                    self.use((name, first + each), writes=writes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].ndim == 2:
            self.use_pages(args[1], writes=False)
            self.use_pages(args[0], writes=True)
        return func(*args, **(kwargs or {}))

    def copies(self, tensors: Sequence[torch.Tensor]) -> OrderedCopies:
        return OrderedCopies(self, tensors)


class OrderedCopies:
    """``PageCopies`` that tell which pages they use."""

    def __init__(self, order: Order, tensors: Sequence[torch.Tensor]) -> None:
        self._order, self._copies = order, ReferencePageCopies(tensors)

    def gather(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        self._use(blocks, writes=False)
        self._order.use_pages(pages, writes=True)
        with torch.utils._python_dispatch._disable_current_modes():
            self._copies.gather(blocks, pages)

    def scatter(self, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        self._order.use_pages(pages, writes=False)
        self._use(blocks, writes=True)
        with torch.utils._python_dispatch._disable_current_modes():
            self._copies.scatter(pages, blocks)

    def _use(self, blocks: torch.Tensor, *, writes: bool) -> None:
        for block in blocks.tolist():
            self._order.use(("block", block), writes=writes)


class OrderedStream(Stream):
    def __init__(self, order: Order) -> None:
        self._order, self._number = order, order.num_streams
        order.num_streams += 1

    @contextmanager
    def current(self) -> Iterator[None]:
        before, self._order.current = self._order.current, self._number
        yield
        self._order.current = before


class OrderedEvent(Event):
    """Loads end at random; of other work the host never knows that it is over."""

    def __init__(self, order: Order) -> None:
        self._order, self._stream = order, order.current
        self._knows = dict(order.knows[order.current])

    @property
    def is_reached(self) -> bool:
        return self._stream == LOADS and self._order.rng.random() < 0.5

    def hold(self) -> None:
        own = self._order.knows[self._order.current]
        for stream, count in self._knows.items():
            own[stream] = max(own[stream], count)


class OrderedDevice:
    """The CPU, with simulated streams."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._device: CpuDevice = CPU

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def stream(self) -> Stream:
        return OrderedStream(self._order)

    def event(self) -> Event:
        return OrderedEvent(self._order)
