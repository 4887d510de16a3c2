"""State that the checks of a server share, beside the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from chorale.selfcheck.check import Found
from chorale.selfcheck.recorded import Sequence
from chorale.selfcheck.serving.server import Server

READS_ENGLISH = 1000.0  # perplexity of plain English: random weights have some 200,000


@dataclass(slots=True)
class Context:
    """``sequences`` and ``perplexity`` are written by the check "record" alone."""

    quick: bool
    is_slow: bool  # a full-size model without an accelerator
    has_accelerator: bool
    is_small: bool  # the demo, or a model of its size
    max_num_seqs: int  # of one engine
    perplexity: float | None = None
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def is_trained(self) -> bool:
        """Returns whether the weights read English, so that answers can be asked of them."""
        return self.perplexity is not None and self.perplexity < READS_ENGLISH


ServerCheck = Callable[[Server, Context], Awaitable[Found]]
