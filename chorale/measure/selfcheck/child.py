"""The checks of the device, in a child process: ``python -m chorale.measure.selfcheck.child``.

The child reads a ``Plan`` (msgpack) from standard input, and writes an ``Outcome``, a line of JSON, for each
check. The parent kills it if a check takes too long, and it ends when the parent does.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO

import msgspec

from chorale.machine.processes import die_with_parent, module_command, settle_signals
from chorale.measure.selfcheck.check import Check, Failed, Outcome, Plan, Skipped, outcome_of

_COMMAND = module_command("chorale.measure.selfcheck.child")
_START_SECONDS = 120.0  # added to the first check's limit, to import torch and open the device


def device_outcomes(checks: Sequence[Check], plan: Plan) -> Iterator[Check | Outcome]:
    """Yields each check when it begins, then its outcome. A check that takes too long, or ends the process,
    fails, and the remaining checks run in a new process."""
    rest = list(checks)
    while rest:
        order = replace(plan, checks=rest, serve_arguments=(), api_key=None)  # no secrets
        with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as given:
            given.write(msgspec.msgpack.encode(order))
            given.seek(0)
            # In a new session, so that Ctrl-C reaches only this process. Unbuffered, for ``select``.
            process = subprocess.Popen(
                (*_COMMAND, str(os.getpid())), stdin=given, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
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


def _outcomes(plan: Plan) -> Iterator[Outcome]:
    """Opens the device and the checkpoint in the first check. If that fails, the others are skipped."""
    from chorale.measure.selfcheck.device.machine import open_machine  # imports torch

    machine, fault = None, ""
    for check in plan.checks:
        begin = time.perf_counter()
        try:
            if fault:
                raise Skipped(f"the checkpoint or the device cannot be opened: {fault}")
            if machine is None:
                machine = open_machine(plan)
            yield outcome_of(check.name, check.function(machine), begin)
        except Exception as error:
            fault = fault or ("" if machine is not None else str(error).partition("\n")[0])
            yield outcome_of(check.name, error, begin)


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    settle_signals()
    plan = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Plan)
    with os.fdopen(os.dup(1), "w", buffering=1) as report, contextlib.suppress(BrokenPipeError):
        os.dup2(2, 1)  # output of libraries goes to standard error
        for outcome in _outcomes(plan):
            report.write(msgspec.json.encode(outcome).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
