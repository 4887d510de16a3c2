"""Progress: reports of start-up phases. Imports no torch."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """``fraction`` is 0..1 within the phase, or None if it is unknown."""

    def __call__(self, phase: str, fraction: float | None = None, message: str = "") -> None: ...
