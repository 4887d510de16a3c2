"""Streams and events for copies that run in parallel to steps. On the host nothing overlaps, and they do
nothing."""

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
        """Let work enqueued later on the current stream wait for this event."""
        ...


class Stream(Protocol):
    """A queue of work that runs independently of other streams."""

    def current(self) -> AbstractContextManager[None]:
        """Make this the current stream within a ``with`` block."""
        ...


class HostStream:
    """No stream: work is complete when it is enqueued."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()


class HostEvent:
    """An event that has been reached."""

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
    """A point in the current stream's work."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def is_reached(self) -> bool:
        return bool(self._event.query())

    def hold(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
