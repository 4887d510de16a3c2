"""A server whose disk is full or read-only starts, answers without storing, and says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = ("-m", "tests.support.store.small_disk")


def _namespaces() -> bool:
    """Whether this machine lets us mount a small disk of our own."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    tried = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


def run_on_a_small_disk(case: str, folder: Path) -> str:
    """Returns what was logged."""
    done = subprocess.run(
        ["unshare", "-Urm", "--kill-child", "--fork", sys.executable, *SCRIPT, case, folder],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "held"
    assert "Traceback" not in done.stderr
    return done.stderr


needs_namespaces = pytest.mark.skipif(
    not _namespaces(), reason="no mount namespaces of our own here (unshare -Urm)"
)


@needs_namespaces
@pytest.mark.parametrize("case", ["new", "crash", "ro"])
def test_a_server_without_space_starts_and_answers(case: str, tmp_path: Path) -> None:
    log = run_on_a_small_disk(case, tmp_path)
    assert len([line for line in log.splitlines() if "not stored until" in line]) == 1, log


@needs_namespaces
@pytest.mark.parametrize("case", ["upload", "killed", "batch"])
def test_files_work_again_once_there_is_space(case: str, tmp_path: Path) -> None:
    run_on_a_small_disk(case, tmp_path)
