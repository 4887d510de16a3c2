"""Helpers that tests share, and programs that they start (``python -m tests.support.NAME``)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository
PATIENCE = 200.0  # seconds after which a test gives up waiting: the machine may be busy
REAPER = ROOT / "tests" / "support" / "serve" / "reaper.py"  # ends what a run has started
