"""Work that takes long is done beside the event loop, so that streams and health checks go on.

Two threads for all requests together: a thread that wants the interpreter gets it after the switch interval
from each of those that run, so a handful of them would hold the loop up by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

# Above this text is encoded, or a value walked, in a thread: 32 kB take about 2 ms.
HEAVY = 32 * 1024
_VALUE = 16  # what a number, a key or an empty container counts
_threads = ThreadPoolExecutor(2, thread_name_prefix="chorale-heavy")


async def beside(work: Callable[[], Result], *, heavy: bool = True) -> Result:
    """``work()``; in a thread if it is heavy."""
    if not heavy:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


def is_heavy(*values: Any, enough: int = HEAVY) -> bool:
    """Whether the strings within ``values``, and 16 a value, come to more than ``enough``.

    Looks at no more than it takes to know, so that asking is cheap. Values as JSON has them.
    """
    left, stack = enough, list(values)
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
