"""Runs coroutines of tests. ``tests/conftest.py`` runs each test that is a coroutine with it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any


def run(coroutine: Any) -> Any:
    """Its outcome; asserts that no task or future is left with a fault that nobody has seen: the collector
    would write it into the log, some time, of whoever runs then."""
    lost: list[dict[str, Any]] = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
        return await coroutine

    try:
        return asyncio.run(watched())
    finally:
        gc.collect(1)  # what this test has made; the whole heap takes 50 ms
        assert not lost, lost
