"""The engine loop of the engine process: receive, step, deliver."""

from __future__ import annotations

import time
from typing import Protocol

from chorale.client.base import Core

QUIET = 1.0  # seconds without work after which the engine uses its idle time
IDLE_WAIT = 0.5  # seconds between two calls of ``receive`` while there is no work


class Inbox(Protocol):
    """Source of an engine's requests and destination of its tokens."""

    def receive(self, core: Core) -> bool:
        """Hand everything that has arrived to ``core``. Returns False if the loop should end."""
        ...

    def wait(self, timeout: float) -> None:
        """Block until something arrives, for at most ``timeout`` seconds."""
        ...

    def step(self, core: Core) -> None:
        """Run one step and deliver its chunks."""
        ...


def run_engine_loop(core: Core, inbox: Inbox) -> None:
    """Run until ``inbox`` ends the loop. Raises any error of a step.

    After ``QUIET`` seconds without work, ``core.use_idle_time`` runs between checks of ``inbox``.
    """
    worked_at = time.monotonic()
    while inbox.receive(core):
        if core.has_work:
            worked_at = time.monotonic()
            inbox.step(core)
        else:
            is_quiet = time.monotonic() - worked_at >= QUIET
            inbox.wait(0 if is_quiet and core.use_idle_time() else IDLE_WAIT)
