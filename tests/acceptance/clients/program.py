"""Clients that are programs, each in a separate environment made by ``install.sh``."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Program:
    """A Python interpreter whose path is in an environment variable."""

    variable: str

    @property
    def skip(self) -> pytest.MarkDecorator:
        """Returns a mark that skips tests if the program is not installed."""
        missing = f"{self.variable} names no environment (install.sh)"
        return pytest.mark.skipif(self.variable not in os.environ, reason=missing)

    def run(self, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs its module with these arguments in ``folder``; fails unless it exits with 0."""
        done = subprocess.run(
            [os.environ[self.variable], "-m", *arguments],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "unused", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done
