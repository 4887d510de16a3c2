"""Child processes: the answer of a program, and the termination of a process, its group and its pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping

_ANSWER_SECONDS = 10
_LOOK_SECONDS, _MAX_LOOKS = 0.005, 400  # two seconds; a killed process ends in a few milliseconds


async def ask(*argv: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs a program. Returns its exit code and its output, or 1 and a reason if it takes too long."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(environment),
    )
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, f"no answer within {_ANSWER_SECONDS} s"
    return process.returncode or 0, output.decode(errors="replace")


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kills the group of a process started with ``start_new_session``, even if the process itself has ended.

    A process id is not reused while a group has it: if a new process has the id, the group is gone.
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
    """Ends a process completely, even if a pipe is full or a grandchild holds its other end.

    asyncio waits for the pipes before it reports the exit, and a paused reader never sees their end, so the
    transport must be closed first. It must not be closed before the exit is known, however: closing also
    collects the exit status, and asyncio's child watcher would then warn about an unknown process.
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
    await asyncio.sleep(0)  # lets the pipe transports process their closing
