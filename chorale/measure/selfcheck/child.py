"""The checks of the device, in a child process: ``python -m chorale.measure.selfcheck.child``.

The child reads an ``Order`` (msgpack) from standard input, and writes an ``Outcome``, a line of JSON, for
each check. The parent kills it if a check takes too long, and it ends when the parent does.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec

from chorale.machine.processes import die_with_parent, module_command, settle_signals
from chorale.measure.selfcheck.check import Check, Failed, Outcome, Plan, Skipped, outcome_of
from chorale.measure.selfcheck.recorded import Order
from chorale.measure.selfcheck.table import CHECKS

_COMMAND = module_command("chorale.measure.selfcheck.child")
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


def _outcomes(order: Order) -> Iterator[Outcome]:
    """Opens the device and the checkpoint in the first check. If that fails, the others are skipped."""
    from chorale.measure.selfcheck.device.machine import open_machine  # imports torch

    machine, fault = None, ""
    for check in (check for check in CHECKS if check.name in order.checks):
        begin = time.perf_counter()
        try:
            if fault:
                raise Skipped(f"the checkpoint or the device cannot be opened: {fault}")
            if machine is None:
                machine = open_machine(order.config, quick=order.quick, recording=order.recording)
            yield outcome_of(check.name, check.function(machine), begin)
        except Exception as error:
            fault = fault or ("" if machine is not None else str(error).partition("\n")[0])
            yield outcome_of(check.name, error, begin)


def main() -> int:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    die_with_parent(order.parent_pid)
    settle_signals()
    with os.fdopen(os.dup(1), "w", buffering=1) as report, contextlib.suppress(BrokenPipeError):
        os.dup2(2, 1)  # output of libraries goes to standard error
        for outcome in _outcomes(order):
            report.write(msgspec.json.encode(outcome).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
