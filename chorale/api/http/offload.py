"""Runs long work in threads, so that the event loop can continue to serve streams and health checks.

All requests share two threads. The event loop waits for up to a switch interval per running thread to get the
interpreter lock, so more threads would delay it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

Result = TypeVar("Result")

# Longer text is encoded, and larger values are converted, in a thread: 32 kB take about 2 ms.
HEAVY = 32 * 1024
_VALUE = 16  # weight of a number, a key or an empty container
_threads = ThreadPoolExecutor(2, thread_name_prefix="chorale-heavy")


async def beside(work: Callable[[], Result], *, heavy: bool = True) -> Result:
    """Returns the result of ``work()``, called in a thread with the caller's context if it is heavy."""
    if not heavy:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, copy_context().run, work)


def is_heavy(*values: Any) -> bool:
    """Returns whether JSON ``values`` weigh more than ``HEAVY``: the length of strings plus 16 per value.

    Stops as soon as the answer is known, so that the check is cheap.
    """
    left, stack = HEAVY, list(values)
    while stack:
        value = stack.pop()
        left -= len(value) if isinstance(value, str) else _VALUE
        if isinstance(value, list | tuple | dict):
            left -= _VALUE * len(value)
            if left >= 0:
                stack.extend(value.values() if isinstance(value, dict) else value)
        if left < 0:
            return True
    return False
