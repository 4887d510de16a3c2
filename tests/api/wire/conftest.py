"""The wire tests share the helpers of Responses and of the scripted tools."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "responses"), str(HERE.parent / "tools")]
