"""The reason why calls are wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` is the leaderboard's name of the error, for comparison with its reports."""

    kind: str
    message: str
    detail: dict[str, Any] = field(default_factory=dict)
