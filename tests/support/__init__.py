"""Helpers that tests share, and programs that they start (``python -m tests.support.NAME``)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]  # path of the repository
PATIENCE = 200.0  # longest wait of a test in seconds, for a busy machine
REAPER = ROOT / "tests" / "support" / "serve" / "reaper.py"  # kills what a test run has started
