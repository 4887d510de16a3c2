"""``python -m chorale.selfcheck.device.process``: the child that runs checks on the device.

Reads an ``Order`` (msgpack) from standard input, and writes a line of JSON when a check begins and one when
it has ended. It ends with its parent, which ends it if a check takes too long.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import msgspec

from chorale.config.engine import EngineConfig
from chorale.errors import ChoraleError
from chorale.machine.processes import die_with_parent, settle_signals
from chorale.selfcheck.check import Failed, Found, Outcome, Skipped


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The checks to run: their names, in order."""

    parent_pid: int
    config: EngineConfig
    checks: list[str]
    quick: bool = False
    recording: str | None = None  # a file


class Begins(msgspec.Struct, frozen=True, tag="begins"):
    name: str


class Ends(msgspec.Struct, frozen=True, tag="ends"):
    outcome: Outcome


def _checks(order: Order) -> dict[str, Callable[[Any], Found]]:
    """Returns the functions of all checks that run here. Imports torch."""
    from chorale.selfcheck.device import answers, files, logprobs, long_attention, op_checks, sampling
    from chorale.selfcheck.recorded import read_recording

    def compare(machine: Any) -> Found:
        if order.recording is None or not Path(order.recording).exists():
            raise Skipped("the server recorded no log-probabilities")
        return logprobs.check_logprobs(machine, read_recording(Path(order.recording)))

    return {
        "shapes": files.check_shapes,
        "checksums": files.check_checksums,
        "values": files.check_values,
        "answers": answers.check_answers,
        "kernels": op_checks.check_ops,
        "attention": long_attention.check_long_attention,
        "sampling": sampling.check_sampling,
        "logprobs": compare,
    }


def run_one(name: str, check: Callable[[], Found]) -> Outcome:
    """Runs one check; whatever it raises becomes its outcome."""
    begin = time.perf_counter()

    def outcome(verdict: Any, detail: str, facts: dict[str, Any] | None = None) -> Outcome:
        return Outcome(name, verdict, detail, time.perf_counter() - begin, facts or {})

    try:
        found = check()
    except Failed as fault:
        return outcome("failed", fault.detail, fault.facts)
    except Skipped as reason:
        return outcome("skipped", str(reason))
    except ChoraleError as error:
        return outcome("failed", error.message)
    except Exception as error:  # whatever a device may raise; the next check still runs
        lines = str(error).strip().splitlines()
        return outcome("failed", f"{type(error).__name__}: {lines[0] if lines else ''}"[:400])
    return outcome("ok", found.detail, found.facts)


def main() -> int:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    die_with_parent(order.parent_pid)
    settle_signals()
    with os.fdopen(os.dup(1), "w", buffering=1) as report:
        os.dup2(2, 1)  # what libraries print is not a report
        _run(order, report)
    return 0


def _run(order: Order, report: TextIO) -> None:
    checks, machines = _checks(order), _Machines(order)
    for name in order.checks:
        _say(report, Begins(name))
        _say(report, Ends(run_one(name, partial(machines.run, checks[name]))))


class _Machines:
    """Opens device and checkpoint for the first check; if that fails, the others are skipped."""

    def __init__(self, order: Order) -> None:
        self._order, self._fault = order, ""
        self._machine: Any = None

    def run(self, check: Callable[[Any], Found]) -> Found:
        from chorale.selfcheck.device.machine import open_machine

        if self._fault:
            raise Skipped(f"the checkpoint or the device cannot be opened: {self._fault}")
        if self._machine is None:
            try:
                self._machine = open_machine(self._order.config, quick=self._order.quick)
            except Exception as error:
                self._fault = str(error).partition("\n")[0]
                raise
        return check(self._machine)


def _say(report: TextIO, message: Begins | Ends) -> None:
    with contextlib.suppress(BrokenPipeError):
        report.write(msgspec.json.encode(message).decode() + "\n")


if __name__ == "__main__":
    sys.exit(main())
