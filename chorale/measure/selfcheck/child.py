"""The child process of the device's checks, from its parent: one order, outcomes as they come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import IO

import msgspec

from chorale.config.engine import EngineConfig
from chorale.measure.selfcheck.check import Check, Outcome
from chorale.measure.selfcheck.recorded import Order, Recording

_COMMAND = (sys.executable, "-m", "chorale.measure.selfcheck.device.process")
_START_SECONDS = 120.0  # importing torch and opening the device, on top of the first check's limit
_LINE_BYTES = 4 * 2**20


async def device_outcomes(
    checks: Sequence[Check], config: EngineConfig, recording: Recording, *, quick: bool
) -> AsyncIterator[Check | Outcome]:
    """Yields each check when it begins, then its outcome. A check that takes too long, or ends the process,
    has failed, and the others run in a new process."""
    rest = list(checks)
    while rest:
        order = Order(os.getpid(), config, [check.name for check in rest], quick, recording)
        slack, is_alive = _START_SECONDS, True
        with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as given:
            given.write(msgspec.msgpack.encode(order))
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                *_COMMAND,
                stdin=given,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_LINE_BYTES,
                start_new_session=True,  # Ctrl-C is this process's business
            )
            try:
                while rest and is_alive:
                    check = rest.pop(0)
                    yield check
                    begin = asyncio.get_running_loop().time()
                    outcome, fault = await _outcome(process, check.seconds + slack, log)
                    slack, is_alive = 0.0, outcome is not None
                    seconds = asyncio.get_running_loop().time() - begin
                    yield outcome or Outcome(check.name, "failed", fault, seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _outcome(
    process: asyncio.subprocess.Process, seconds: float, log: IO[bytes]
) -> tuple[Outcome | None, str]:
    """The next outcome, or None and why there is none."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(seconds):
            line = await process.stdout.readline()
    except TimeoutError:
        return None, f"took longer than {seconds:.0f} s and was ended"
    if line:
        return msgspec.json.decode(line, type=Outcome), ""
    status = await process.wait()
    log.seek(0)
    text = log.read().decode("utf-8", "replace").strip()
    tail = " | ".join(text[-500:].splitlines()[-4:]) or "it printed nothing"
    return None, f"its process ended ({status}): {tail}"
