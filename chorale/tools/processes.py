"""The end of a child process: it and its group are killed, its pipes are closed, and it is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

_LOOK_SECONDS, _MAX_LOOKS = 0.005, 400  # two seconds; a killed process ends in a few milliseconds


def kill_group(process: asyncio.subprocess.Process) -> None:
    """For processes started with ``start_new_session``: also what one that has ended left in its group.

    A number is not given away while a group bears it: if a process has it again, the group is not ours.
    """
    if process.returncode is not None and _exists(process.pid):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Afterwards nothing of it is left, also when a pipe is full or a grandchild holds its other end.

    asyncio waits for the pipes before it reports the exit, and a reader that stopped reading never sees their
    end: the transport is closed first. Not before the exit is known, however: closing collects the exit
    status too, and asyncio's own collector would then complain about a process that it does not find.
    """
    kill_group(process)
    transport = getattr(process, "_transport", None)
    if transport is not None:
        for _ in range(_MAX_LOOKS):
            if transport.get_returncode() is not None:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        transport.close()
    await process.wait()
    await asyncio.sleep(0)  # lets the transports of the pipes hear that they are closed
