"""The table and the JSON of a self-check."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from chorale.measure.selfcheck.check import Outcome
from chorale.measure.selfcheck.table import CHECKS

SHOWN = {"ok": "OK", "failed": "FAILED", "skipped": "skipped"}
_CHECKS = {check.name: check for check in CHECKS}


def line(outcome: Outcome, width: int) -> str:
    """Returns an outcome as text: verdict, name, seconds, purpose, result, and a remedy if it failed."""
    check = _CHECKS[outcome.name]
    head = f"{SHOWN[outcome.verdict]:<8} {outcome.name:<12} {outcome.seconds:7.1f} s  "
    lines = _wrapped(head, check.proves, width)
    found = outcome.detail if outcome.verdict != "skipped" else f"not checked: {outcome.detail}"
    lines += _wrapped(" " * len(head), found, width)
    if outcome.verdict == "failed":
        lines += _wrapped(" " * len(head), f"to do: {check.remedy}", width)
    return "\n".join(lines)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    shown = "".join(c if c.isprintable() else " " for c in text)
    wide = max(width, len(head) + 30)
    return textwrap.wrap(
        shown, wide, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    ) or [head.rstrip()]


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    counts = {name: sum(each.verdict == name for each in outcomes) for name in SHOWN}
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    failed = [each.name for each in outcomes if each.verdict == "failed"]
    end = f"{len(failed)} FAILED: {', '.join(failed)}" if failed else "none failed"
    return f"{counts['ok']} checks passed{skipped}, {end}; {seconds:.0f} s"


def to_json(
    outcomes: Sequence[Outcome], seconds: float, model: str, machine: dict[str, Any], version: str
) -> dict[str, Any]:
    return {
        "kind": "selfcheck",
        "version": version,
        "model": model,
        "machine": machine,
        "seconds": round(seconds, 1),
        "ok": not any(each.verdict == "failed" for each in outcomes),
        "checks": [
            {
                **asdict(each),
                "proves": _CHECKS[each.name].proves,
                "seconds": round(each.seconds, 2),
                "remedy": _CHECKS[each.name].remedy if each.verdict == "failed" else None,
            }
            for each in outcomes
        ],
    }
