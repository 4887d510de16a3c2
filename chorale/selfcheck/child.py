"""The child process of the device's checks, from its parent: one order, outcomes as they come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from chorale.config.engine import EngineConfig
from chorale.selfcheck.check import Check, Outcome
from chorale.selfcheck.device.process import Begins, Ends, Order

_COMMAND = (sys.executable, "-m", "chorale.selfcheck.device.process")
_START_SECONDS = 120.0  # importing torch and opening the device, on top of the first check's limit
_LINE_BYTES = 4 * 2**20
_LOG_SHOWN = 500


async def device_outcomes(
    checks: Sequence[Check], config: EngineConfig, *, quick: bool, recording: Path | None
) -> AsyncIterator[Check | Outcome]:
    """Yields each check when it begins, then its outcome. A check that takes too long, or ends the process,
    has failed, and the others run in a new process."""
    rest = list(checks)
    slack = _START_SECONDS
    while rest:
        order = Order(
            parent_pid=os.getpid(),
            config=config,
            checks=[check.name for check in rest],
            quick=quick,
            recording=None if recording is None else str(recording),
        )
        with tempfile.TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(
                *_COMMAND,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_LINE_BYTES,
                start_new_session=True,  # Ctrl-C is this process's business
            )
            try:
                await _give(process, order)
                while rest:
                    check = rest[0]
                    yield check
                    begin = asyncio.get_running_loop().time()
                    try:
                        async with asyncio.timeout(check.seconds + slack):
                            outcome = await _outcome(process)
                    except TimeoutError:
                        outcome = None
                        detail = f"took longer than {check.seconds:.0f} s and was ended"
                    else:
                        detail = (
                            "" if outcome else f"its process ended ({await process.wait()}): {_tail(log)}"
                        )
                    rest.pop(0)
                    slack = 0.0 if outcome else _START_SECONDS
                    seconds = asyncio.get_running_loop().time() - begin
                    yield outcome or Outcome(check.name, "failed", detail, seconds)
                    if outcome is None:
                        break
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _give(process: asyncio.subprocess.Process, order: Order) -> None:
    stdin = process.stdin
    assert stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(msgspec.msgpack.encode(order))
        await stdin.drain()
    stdin.close()


async def _outcome(process: asyncio.subprocess.Process) -> Outcome | None:
    """The next outcome, or None if the process has ended without one."""
    stdout = process.stdout
    assert stdout is not None
    while line := await stdout.readline():
        message = msgspec.json.decode(line, type=Begins | Ends)
        if isinstance(message, Ends):
            return message.outcome
    return None


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    text = log.read().decode("utf-8", "replace").strip()
    return " | ".join(text[-_LOG_SHOWN:].splitlines()[-4:]) or "it printed nothing"
