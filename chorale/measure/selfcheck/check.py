"""The types of checks, of a run of them, and of their results. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from chorale.config.engine import EngineConfig
from chorale.errors import ChoraleError
from chorale.measure.selfcheck.recorded import Recording

Verdict = Literal["ok", "failed", "skipped"]
Stage = Literal["device", "server", "after"]
REPORT = "report it, with the output of --json"


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the table.

    ``stage``: "device" runs in a child process before the server starts, "server" over HTTP, and "after" in a
    child process again, on the recording of the server, once that has ended.
    ``module``: the module with the function ``check_NAME``.
    """

    name: str
    stage: Stage
    module: str
    seconds: float  # time limit
    proves: str
    remedy: str = REPORT  # what to do if the check fails
    quick: bool = True  # also runs with --quick

    @property
    def function(self) -> Callable[..., Any]:
        module = import_module(f"chorale.measure.selfcheck.{self.module}")
        found: Callable[..., Any] = getattr(module, f"check_{self.name}")
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """The checks to run and their settings. Only the check "record" writes to ``recording``."""

    checks: Sequence[Check]
    config: EngineConfig
    serve_arguments: Sequence[str] = ()
    api_key: str | None = field(default=None, repr=False)
    tls: bool = False
    quick: bool = False
    has_accelerator: bool = False
    is_slow: bool = False  # a full-size model without an accelerator: a few thousand tokens take minutes
    recording: Recording = field(default_factory=Recording)

    @property
    def few(self) -> bool:
        """Returns whether the checks use few rows and tokens."""
        return self.is_slow or self.quick


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a check that passed. ``facts``: numbers for the JSON output."""

    detail: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check. ``detail``: the numbers, the fault, or why it was skipped."""

    name: str
    verdict: Verdict
    detail: str
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


class Failed(Exception):
    """A check has failed. ``detail`` says what is wrong, for the operator."""

    def __init__(self, detail: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(detail)
        self.detail, self.facts = detail, facts or {}


class Skipped(Exception):
    """A check cannot prove anything here. The message gives the reason."""


def outcome_of(name: str, result: Found | Exception, begin: float) -> Outcome:
    """Returns the outcome of a check that returned or raised ``result``. Every exception becomes an outcome,
    so that the next check still runs. ``begin``: start of the check, by ``time.perf_counter``."""
    seconds = time.perf_counter() - begin
    while isinstance(result, ExceptionGroup):  # raised by concurrent requests
        result = result.exceptions[0]
    match result:
        case Found():
            return Outcome(name, "ok", result.detail, seconds, result.facts)
        case Failed():
            return Outcome(name, "failed", result.detail, seconds, result.facts)
        case Skipped():
            return Outcome(name, "skipped", str(result), seconds)
        case ChoraleError():
            return Outcome(name, "failed", result.message, seconds)
    lines = str(result).strip().splitlines()
    return Outcome(name, "failed", f"{type(result).__name__}: {lines[0] if lines else ''}"[:400], seconds)
