"""Streams and events for copies that run in parallel to steps. On the host nothing overlaps, and they do
nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Event:
    """A point in a stream's work. On the host it has been reached."""

    @property
    def is_reached(self) -> bool:
        return True

    def hold(self) -> None:
        """Let work enqueued later on the current stream wait for this event."""


class Stream:
    """A queue of work that runs independently of other streams. On the host work is complete when it is
    enqueued."""

    def current(self) -> AbstractContextManager[object]:
        """Make this the current stream within a ``with`` block."""
        return nullcontext()


class CudaStream(Stream):
    """A stream of the current GPU."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)


class CudaEvent(Event):
    """A point in the current stream's work."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def is_reached(self) -> bool:
        return bool(self._event.query())

    def hold(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
