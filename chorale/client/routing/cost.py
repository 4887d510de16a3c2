"""The cost of a request on a replica: a pure function of the replica's backlog and of the cached tokens.

The unit is one prompt token to compute.
"""

from __future__ import annotations

from dataclasses import dataclass

# Cost of one running row, in prompt tokens. A row makes each of about 200 steps 0.04 to 0.2 ms longer for the
# other rows (120b on one H200, docs/reference/benchmarks.md); computing one prompt token takes 0.02 ms.
ROW_TOKENS = 512
# Above this number of rows, a row costs more than twice as much, so that requests with one long prefix
# spread: a second replica computes the prefix once, and then has it cached, too.
CROWD = 32
SHORTAGE = 4  # cost of a token that the free KV cache has no room for: it waits, or others are preempted


@dataclass(frozen=True, slots=True)
class Backlog:
    """The unfinished work of a replica, including this client's newest requests."""

    tokens_left: int = 0  # prompt tokens still to be computed
    num_rows: int = 0  # running and waiting choices
    free_tokens: int | None = None  # free capacity of the KV cache; None: unknown


def cost(backlog: Backlog, num_prompt: int, num_cached: int) -> float:
    """Returns the cost of one more request, if the replica has ``num_cached`` of its prompt tokens cached."""
    computed = backlog.tokens_left + num_prompt - num_cached
    rows = ROW_TOKENS * backlog.num_rows * (1 + backlog.num_rows / CROWD)
    short = 0 if backlog.free_tokens is None else max(0, computed - backlog.free_tokens)
    return computed + rows + SHORTAGE * short
