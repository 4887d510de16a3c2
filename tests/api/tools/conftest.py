"""Helpers of the neighbouring folders are imported by their bare names."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE.parent, HERE.parent / "responses"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
