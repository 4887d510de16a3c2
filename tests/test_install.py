"""``scripts/install.sh`` shows what it does, and an error of the installer once and in full."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support import ROOT


def install(folder: Path, uv: str, requirement: str = ".", progress: int = 15) -> tuple[int, str]:
    """Runs the script with a program ``uv`` that has this text. Returns exit code and output."""
    program = folder / "uv"
    program.write_text(f"#!/bin/sh\necho call >>{folder}/calls\n{uv}\n")
    program.chmod(0o755)
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "install.sh"), str(folder / "venv"), requirement],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PROGRESS": str(progress)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_an_error_appears_once_and_is_not_repeated(tmp_path: Path) -> None:
    code, shown = install(tmp_path, "echo 'invalid peer certificate' >&2; exit 2", ".[test]")
    assert code == 1
    assert shown.count("invalid peer certificate") == 1
    assert "INSTALLER=pip" in shown
    assert (tmp_path / "calls").read_text().split() == ["call"]


def test_without_pytorchs_index_the_default_index_is_used(tmp_path: Path) -> None:
    code, shown = install(tmp_path, 'case "$*" in *torch-backend*) echo download.pytorch.org; exit 2;; esac')
    assert code == 0
    assert "default index" in shown
    assert (tmp_path / "calls").read_text().split() == ["call", "call"]


def test_a_long_installation_shows_its_progress(tmp_path: Path) -> None:
    code, shown = install(tmp_path, "echo 'Downloading torch (190 MB)'; sleep 2.5", progress=1)
    assert code == 0
    assert " s: Downloading torch (190 MB)" in shown
