"""The choice of a replica for a request: a pure function of the loads and of the cached tokens.

The unit is a prompt token that has to be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

# A row adds its share to every step that the others wait for. From the published figures of one H200
# (docs/benchmarks.md): 0.04 to 0.2 ms a step for 120b, at 0.02 ms a prompt token, over some 200 tokens.
ROW_TOKENS = 512
# From this number of rows on, a row costs more than twice as much, so that the requests for one long prefix
# spread: a second replica computes it once, and then has it, too.
CROWD = 32
SHORTAGE = 4  # per token that does not fit the free part of the KV cache: others are preempted, or it waits


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a replica, this client's newest requests included."""

    tokens_left: int = 0  # of prompts that wait or are being computed
    num_rows: int = 0  # choices that run or wait
    free_tokens: int | None = None  # that the KV cache can take; None: unknown


def cost(load: Load, num_prompt: int, num_cached: int) -> float:
    """Returns the cost of one more request, of which ``num_cached`` prompt tokens are cached there."""
    computed = load.tokens_left + num_prompt - num_cached
    rows = ROW_TOKENS * load.num_rows * (1 + load.num_rows / CROWD)
    short = 0 if load.free_tokens is None else max(0, computed - load.free_tokens)
    return computed + rows + SHORTAGE * short
