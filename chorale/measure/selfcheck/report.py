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
    check, is_skipped = _CHECKS[outcome.name], outcome.verdict == "skipped"
    head = f"{SHOWN[outcome.verdict]:<8} {outcome.name:<12} {outcome.seconds:7.1f} s  "
    texts = [check.proves, f"not checked: {outcome.detail}" if is_skipped else outcome.detail]
    if outcome.verdict == "failed":
        texts.append(f"to do: {check.remedy}")
    indent = " " * len(head)
    wrapper = textwrap.TextWrapper(
        max(width, len(head) + 30), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    shown = ["".join(c if c.isprintable() else " " for c in text) for text in texts]
    return head + "\n".join(wrapper.fill(text) for text in shown).removeprefix(indent)


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
