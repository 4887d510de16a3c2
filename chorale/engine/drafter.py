"""Drafter: the interface, as the engine's state sees it, of an object that guesses next tokens."""

from __future__ import annotations

from typing import Protocol

from chorale.engine.sequence import Sequence


class Drafter(Protocol):
    """Drafts change how fast a sequence advances, never its tokens."""

    def drafts_on_device(self, sequence: Sequence) -> bool:
        """Returns whether the sequence's drafts stay on the device, so that plans need not know them."""
        ...

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence. Its output is complete."""
        ...
