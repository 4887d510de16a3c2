"""Clients' tests share the API tests' helpers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "api"), str(Path(__file__).parents[1] / "tools")]
