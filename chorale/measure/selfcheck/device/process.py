"""``python -m chorale.measure.selfcheck.device.process``: the child that runs checks on the device.

Reads an ``Order`` (msgpack) from standard input, and writes an ``Outcome``, a line of JSON, for each check.
The parent kills it if a check takes too long, and it ends when the parent does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

import msgspec

from chorale.machine.processes import die_with_parent, settle_signals
from chorale.measure.selfcheck.check import Outcome, Skipped, outcome_of
from chorale.measure.selfcheck.recorded import Order
from chorale.measure.selfcheck.table import CHECKS


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
