"""Drafter: what the engine asks for guesses of a sequence's next tokens."""

from __future__ import annotations

from typing import Protocol

from chorale.engine.sequence import Sequence
from chorale.engine.types import IntArray


class Drafter(Protocol):
    """Reads tokens on the host. Drafts change how fast a sequence advances, never its tokens."""

    def propose(self, sequence: Sequence, most: int) -> IntArray:
        """Return up to ``most`` tokens, which are ids of the vocabulary, that may follow prompt and output.

        An empty array if there is no good guess: a draft that is not accepted costs the device time.
        """
        ...

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence, for which ``propose`` may have been called. Its output is complete."""
        ...
