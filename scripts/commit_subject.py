"""Check the subject of a commit message: python scripts/commit_subject.py FILE (called by pre-commit).

"area: what changes", at most 72 characters, without a full stop at the end; the reason is in the body.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
_AREA = re.compile(r"[a-z][a-z0-9_./-]*: \S")
_MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def fault(message: str) -> str | None:
    """Returns the error in a commit message, or None."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(_MADE_BY_GIT):
        return None
    if len(subject) > LONGEST:
        return f"the subject has {len(subject)} characters, {LONGEST} are allowed"
    if not _AREA.match(subject):
        return 'the subject must begin with an area, as in "api: keep CORS headers on errors"'
    if subject.endswith("."):
        return "the subject ends with a full stop"
    if len(lines) > 1 and lines[1].strip():
        return "the second line must be empty"
    return None


if __name__ == "__main__":
    found = fault(Path(sys.argv[1]).read_text("utf-8"))
    if found is not None:
        sys.exit(found)
