"""Parent side of the device checks' child process: sends an order and yields outcomes as they arrive."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec

from chorale.machine.processes import module_command
from chorale.measure.selfcheck.check import Check, Failed, Outcome, Plan, outcome_of
from chorale.measure.selfcheck.recorded import Order

_COMMAND = module_command("chorale.measure.selfcheck.device.process")
_START_SECONDS = 120.0  # added to the first check's limit, to import torch and open the device


def device_outcomes(checks: Sequence[Check], plan: Plan) -> Iterator[Check | Outcome]:
    """Yields each check when it begins, then its outcome. A check that takes too long, or ends the process,
    fails, and the remaining checks run in a new process."""
    rest = list(checks)
    while rest:
        names = [check.name for check in rest]
        order = Order(os.getpid(), plan.config, names, plan.quick, plan.recording)
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
                    yield _next_outcome(process, log, check.seconds + slack)
                    slack = 0.0
            except Failed as fault:
                yield outcome_of(check.name, fault, begin)
            finally:
                process.kill()
                process.communicate()


def _next_outcome(process: subprocess.Popen[bytes], log: IO[bytes], seconds: float) -> Outcome:
    """Waits for the outcome of the current check. Raises ``Failed`` after ``seconds``, or if the process has
    ended. ``log``: its error output."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], seconds)[0]:
        raise Failed(f"took longer than {seconds:.0f} s and was ended")
    if line := process.stdout.readline():
        return msgspec.json.decode(line, type=Outcome)
    code = process.wait()
    log.seek(0)
    text = log.read().decode("utf-8", "replace").strip()
    tail = " | ".join(text[-500:].splitlines()[-4:]) or "it printed nothing"
    raise Failed(f"its process ended ({code}): {tail}")
