"""A server whose disk is full or read-only starts, answers without storing, and says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = ("-m", "tests.support.small_disk")


def _namespaces() -> bool:
    """Whether this machine lets us mount a small disk of our own."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    tried = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _namespaces(), reason="no mount namespaces of our own here (unshare -Urm)")
@pytest.mark.parametrize("case", ["new", "crash", "ro"])
def test_a_server_without_space_starts_and_answers(case: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "-Urm", "--kill-child", "--fork", sys.executable, *SCRIPT, case, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "held"
    warnings = [line for line in done.stderr.splitlines() if "not stored until" in line]
    assert len(warnings) == 1, done.stderr
    assert "Traceback" not in done.stderr
