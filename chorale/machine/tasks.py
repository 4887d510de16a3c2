"""The end of asyncio's tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def end_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancels tasks and waits until they have ended, whatever their results."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
