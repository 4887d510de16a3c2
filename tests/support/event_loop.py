"""Runs coroutines of tests, and waits for conditions. ``tests/conftest.py`` runs async tests with it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

from tests.support import PATIENCE


def run(coroutine: Any) -> Any:
    """Returns the result; asserts that no task or future has an exception that was never retrieved, which the
    garbage collector would log later, during another test."""
    lost: list[dict[str, Any]] = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
        return await coroutine

    try:
        return asyncio.run(watched())
    finally:
        gc.collect(1)  # only the objects of this test; the whole heap takes 50 ms
        assert not lost, lost


async def until(condition: Callable[[], object], what: str = "it", deadline: float = PATIENCE) -> float:
    """Waits for a condition; returns the seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < deadline, f"{what}: not within {deadline} s"
        await asyncio.sleep(0.005)
    return time.monotonic() - start


def wait_until(condition: Callable[[], object], what: str = "it", deadline: float = PATIENCE) -> None:
    """``until`` without an event loop."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < deadline, f"{what}: not within {deadline} s"
        time.sleep(0.02)
