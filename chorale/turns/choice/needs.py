"""The needs of a choice: the values that ``Choice`` returns, and on which its driver matches.

A choice is synchronous and performs no I/O. ``feed`` returns one of these once the choice cannot go on by
itself; the driver does what the value asks for and hands the outcome back, which yields the next value.
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

    ``prefill_token_ids``: the header of an open message with which the prompt ends.
    ``num_new_tokens``: after a tool, how many tokens of the prompt were in no round before; else None.
    ``grammar`` ("" for none) covers the last ``num_own_tokens`` of the prompt too.
    ``num_sampled``: tokens that the choice has sampled so far, of all its rounds.
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

    ``prompt_token_ids``: everything up to ``<|call|>``; the message of the result follows it.
    ``refusal``: the result of a call to a tool that does not exist; nothing is run then.
    ``approved``: the position of the call among those that the user has approved, or None.
    """

    call: ToolCall
    channel: str
    prompt_token_ids: list[int]
    index: int  # of the item
    token_ids: tuple[int, ...]  # of the message that holds the call
    identity: ToolIdentity | None = None
    refusal: ToolResult | None = None
    approved: int | None = None


@dataclass(frozen=True, slots=True)
class Compact:
    """The conversation is to be summarized before ``following``.

    Generate a summary from ``prompt_token_ids``, then call ``compacted``; or call ``skip_compaction``.
    """

    prompt_token_ids: list[int]
    following: NextRound


Need = Ended | NextRound | CallTool | Compact
ENDED = Ended()
