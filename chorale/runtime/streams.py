"""Streams and events for copies beside the steps; on the host, where nothing overlaps, they do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's work."""

    @property
    def is_reached(self) -> bool: ...

    def hold(self) -> None:
        """Let the work that is enqueued on the current stream from now on wait for it."""
        ...


class Stream(Protocol):
    """Work in an order of its own."""

    def current(self) -> AbstractContextManager[None]:
        """Make this the current stream for a ``with``."""
        ...


class HostStream:
    """No stream: work is done when it is enqueued."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()


class HostEvent:
    """A point that has been reached."""

    is_reached = True

    def hold(self) -> None:
        return None


class CudaStream:
    """A stream of the current GPU."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield


class CudaEvent:
    """A point of the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def is_reached(self) -> bool:
        return bool(self._event.query())

    def hold(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
