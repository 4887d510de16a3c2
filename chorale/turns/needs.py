"""The needs of a choice: the values that ``Choice`` returns, and on which its driver matches.

A choice is synchronous and performs no I/O. ``feed`` returns a need when the choice cannot continue by
itself; the driver meets it and hands over the outcome, which yields the next need.
"""

from __future__ import annotations

from dataclasses import dataclass

from chorale.tools.contract import ToolCall, ToolIdentity, ToolResult


@dataclass(frozen=True, slots=True)
class Ended:
    """The choice is over; ``TurnEnded`` is its last event."""


@dataclass(frozen=True, slots=True)
class NextRound:
    """Another generation: submit it, call ``begin_round``, and feed its chunks.

    ``prefill_token_ids``: the header of the open message that ends the prompt. ``num_new_tokens``: after a
    tool, the number of prompt tokens that were in no earlier round; else None. ``grammar`` (or "") also
    covers the last ``num_own_tokens`` of the prompt. ``num_sampled``: tokens sampled so far in all rounds.
    """

    prompt_token_ids: list[int]
    prefill_token_ids: tuple[int, ...] = ()
    num_own_tokens: int = 0
    num_new_tokens: int | None = None
    grammar: str = ""
    num_sampled: int = 0


@dataclass(frozen=True, slots=True)
class CallTool:
    """A call to a built-in tool is complete: run it, then call ``tool_done``.

    ``prompt_token_ids``: everything up to ``<|call|>``; the result's message follows it. ``refusal``: the
    result of a call to a tool that does not exist; nothing is run. ``approved``: the position of the call
    among the approved ones, or None.
    """

    call: ToolCall
    channel: str
    prompt_token_ids: list[int]
    index: int  # the item's index
    token_ids: tuple[int, ...]  # the message that contains the call
    identity: ToolIdentity | None = None
    refusal: ToolResult | None = None
    approved: int | None = None


@dataclass(frozen=True, slots=True)
class Compact:
    """The conversation must be summarized before ``following``.

    Generate a summary from ``prompt_token_ids``, then call ``compacted``; or call ``skip_compaction``.
    """

    prompt_token_ids: list[int]
    following: NextRound


Need = Ended | NextRound | CallTool | Compact
ENDED = Ended()
