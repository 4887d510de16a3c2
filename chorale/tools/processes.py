"""The end of a child process: it and its group are killed, its pipes are closed, and it is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal


def kill_group(process: asyncio.subprocess.Process) -> None:
    """For processes started with ``start_new_session``; a no-op once it has been waited for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Afterwards nothing of it is left, also when a pipe is full or a grandchild holds its other end.

    asyncio waits for the pipes before it reports the exit, and a reader that stopped reading never sees their
    end: the transport is closed first.
    """
    kill_group(process)
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()
    await process.wait()
    await asyncio.sleep(0)  # lets the transports of the pipes hear that they are closed
