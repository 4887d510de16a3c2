"""Clients' tests share the API tests' helpers."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / "api"), str(_TESTS / "tools"), str(_TESTS)]  # _TESTS: for e2e.conftest
