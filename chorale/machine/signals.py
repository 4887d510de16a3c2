"""Signal handling of commands that start a server: they end only after it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
_AGAIN = 0.01  # seconds after which a signal is sent again


class _SignalExit(SystemExit):
    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise an exception, as Ctrl-C does, so that clean-up code runs.

    By default they would end this process alone and leave the server, which has its own session, running.
    A signal that is already ignored (``nohup``) stays ignored. For the main thread only.
    """
    hook = sys.unraisablehook
    sys.unraisablehook = _signal_again
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _leave(number: int, _: FrameType | None) -> None:
    raise _SignalExit(number)


def _signal_again(ignored: sys.UnraisableHookArgs) -> None:
    """Sends a signal again after its exception was lost: Python ignores exceptions that are raised in a
    destructor or in the callback of a weak reference."""
    if not isinstance(ignored.exc_value, _SignalExit):
        sys.__unraisablehook__(ignored)
        return
    again = threading.Timer(_AGAIN, os.kill, (os.getpid(), ignored.exc_value.number))
    again.daemon = True
    again.start()
