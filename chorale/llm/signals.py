"""Runs signal handlers between steps: an exception of a handler within a step would break the engine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# Signals whose handlers may raise: Ctrl-C, termination, and those used for time limits.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


class SignalsBetweenSteps:
    """A context manager that delays signals until ``deliver`` is called.

    If a signal arrives again while it is pending, it is handled at once, because the step may never end.
    Only the main thread handles signals, so in any other thread this does nothing.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> SignalsBetweenSteps:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers and deliver pending signals. Exceptions of the handlers propagate."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._receive:  # else ``take`` has set another handler
                signal.signal(number, handler)
        if self.pending:
            self.deliver()

    def deliver(self) -> None:
        """Call the handlers of pending signals, in order of arrival. Their exceptions propagate."""
        while self.pending:
            number, frame = self.pending.pop(0)
            self._handlers[number](number, frame)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if any(number == other for other, _ in self.pending):
            self._handlers[number](number, frame)
        else:
            self.pending.append((number, frame))
