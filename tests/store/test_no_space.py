"""A server whose disk is full or read-only starts, answers without storing, and logs a warning."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = ("-m", "tests.support.store.small_disk")


def _namespaces() -> bool:
    """Returns whether this machine allows mounting a small disk in a namespace."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    tried = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _namespaces(), reason="cannot create a mount namespace (unshare -Urm)")
def test_a_server_without_space_answers_and_stores_again(tmp_path: Path) -> None:
    cases = ("new", "crash", "ro", "upload", "killed", "batch")
    done = subprocess.run(
        ["unshare", "-Urm", "--kill-child", "--fork", sys.executable, *SCRIPT, tmp_path, *cases],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "held"
    assert "Traceback" not in done.stderr
    assert done.stderr.count("not stored until") == 4, done.stderr  # one for each start without space
