"""The types of checks and of their results. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from chorale.errors import ChoraleError

Verdict = Literal["ok", "failed", "skipped"]
Place = Literal["files", "device", "server", "after"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table.

    ``place``: where it runs. "files" and "device": in a child process, before the server; "server": over
    HTTP; "after": in a child process again, once the server has ended, on what it recorded.
    """

    name: str
    place: Place
    proves: str
    remedy: str  # if it has failed
    seconds: float  # time limit
    quick: bool = True  # runs with --quick, too


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a check that passed. ``facts``: numbers for the JSON output."""

    detail: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check. ``detail`` of a failed one says what is wrong."""

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
    """A check proves nothing here, for the reason given."""


def outcome_of(name: str, error: Exception, seconds: float) -> Outcome:
    """Returns the outcome of a check that raised ``error``, whatever it is: the next check still runs."""
    while isinstance(error, ExceptionGroup):  # of concurrent requests
        error = error.exceptions[0]
    match error:
        case Failed():
            return Outcome(name, "failed", error.detail, seconds, error.facts)
        case Skipped():
            return Outcome(name, "skipped", str(error), seconds)
        case ChoraleError():
            return Outcome(name, "failed", error.message, seconds)
    lines = str(error).strip().splitlines()
    return Outcome(name, "failed", f"{type(error).__name__}: {lines[0] if lines else ''}"[:400], seconds)
