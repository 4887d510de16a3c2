"""Signal handling of commands that start a server: they end only after it has ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise an exception, as Ctrl-C does, so that clean-up code runs.

    By default they would end this process alone and leave the server, which has its own session, running.
    A signal that is already ignored (``nohup``) stays ignored. For the main thread only.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
