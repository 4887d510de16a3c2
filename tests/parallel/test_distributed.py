"""Connections between ranks: what closing them waits for."""

from __future__ import annotations

import threading
import time

from chorale.parallel.distributed import ends_within


def test_a_library_that_does_not_close_is_left_alone() -> None:
    never = threading.Event()

    def wait() -> None:
        never.wait(60)

    began = time.monotonic()
    assert not ends_within(wait, 0.05)
    assert time.monotonic() - began < 30
    assert ends_within(lambda: None, 30)
    never.set()
