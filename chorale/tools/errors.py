"""The exception of the tools. Its message is written for the model, which reads it and continues."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class ToolError(Exception):
    """A call that failed. Never leaves ``ToolBox.call``."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@contextlib.asynccontextmanager
async def deadline(seconds: float, late: ToolError) -> AsyncIterator[None]:
    """``asyncio.timeout`` that raises ``late``."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise late from None
