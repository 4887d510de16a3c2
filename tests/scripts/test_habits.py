"""The rule for commit subjects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUBJECT = ROOT / "scripts" / "commit_subject.py"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("api: keep CORS headers on errors\n\nA page of an allowed origin ...", None),
        ("kernels/moe: one loop less", None),
        ("Merge branch 'x'", None),
        ("# a comment\napi: x", None),
        ("Keep CORS headers on errors", "area"),
        (f"api: {'x' * 68}", "73 characters"),
        ("api: keep CORS headers.", "full stop"),
        ("api: x\nand more", "second line"),
        ("", "area"),
    ],
)
def test_commit_subjects(tmp_path: Path, message: str, expected: str | None) -> None:
    (tmp_path / "message").write_text(message)
    command = [sys.executable, str(SUBJECT), str(tmp_path / "message")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (expected is None), done.stderr
    assert (expected or "") in done.stderr
