"""Parent side of the device checks' child process: sends an order and yields outcomes as they arrive."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence

import msgspec

from chorale.config.engine import EngineConfig
from chorale.machine.processes import module_command
from chorale.measure.selfcheck.check import Check, Failed, Outcome, outcome_of
from chorale.measure.selfcheck.recorded import Order, Recording

_COMMAND = module_command("chorale.measure.selfcheck.device.process")
_START_SECONDS = 120.0  # added to the first check's limit, to import torch and open the device


def device_outcomes(
    checks: Sequence[Check], config: EngineConfig, recording: Recording, *, quick: bool
) -> Iterator[Check | Outcome]:
    """Yields each check when it begins, then its outcome. A check that takes too long, or ends the process,
    fails, and the remaining checks run in a new process."""
    rest = list(checks)
    while rest:
        order = Order(os.getpid(), config, [check.name for check in rest], quick, recording)
        with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as given:
            given.write(msgspec.msgpack.encode(order))
            given.seek(0)
            # In a new session, so that Ctrl-C reaches only this process. Unbuffered, for ``select``.
            process = subprocess.Popen(
                _COMMAND, stdin=given, stdout=subprocess.PIPE, stderr=log, start_new_session=True, bufsize=0
            )
            try:
                slack = _START_SECONDS
                while rest:
                    check = rest.pop(0)
                    yield check
                    begin = time.perf_counter()
                    line = _line(process, check.seconds + slack)
                    if line:
                        yield msgspec.json.decode(line, type=Outcome)
                    else:
                        log.seek(0)
                        fault = _fault(line, process, check.seconds + slack, log.read())
                        yield outcome_of(check.name, fault, begin)
                        break
                    slack = 0.0
            finally:
                process.kill()
                process.communicate()


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Returns the next line, b"" if the process has ended, or None after ``seconds``."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else None


def _fault(line: bytes | None, process: subprocess.Popen[bytes], seconds: float, log: bytes) -> Failed:
    if line is None:
        return Failed(f"took longer than {seconds:.0f} s and was ended")
    text = log.decode("utf-8", "replace").strip()
    tail = " | ".join(text[-500:].splitlines()[-4:]) or "it printed nothing"
    return Failed(f"its process ended ({process.wait()}): {tail}")
