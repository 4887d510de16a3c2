"""OutputEvents: the one stream that every endpoint translates.

``run_turn`` yields these; the Responses, Chat Completions and Completions translators turn them into SSE
chunks, and the non-streaming body is the fold of the same events. Ids, usage and status are decided here,
once, so that the two cannot disagree.

Item ``index`` counts from 0 within one choice; an item is opened, gets deltas, and is closed exactly once;
``TurnEnded`` is last, exactly once. The text of all deltas, concatenated, is the item's final text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from chorale.engine.types import TokenLogprobs
from chorale.errors import ChoraleError

ItemKind = Literal[
    "reasoning",
    "message",
    "function_call",
    "custom_tool_call",
    "web_search_call",
    "code_interpreter_call",
    "mcp_call",
]
ItemStatus = Literal["completed", "incomplete", "failed"]
EndReason = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(slots=True)
class Usage:
    """Token counts of one turn. ``reasoning_tokens`` are analysis content tokens only."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class ItemOpened:
    """An output item began. ``item_id`` is its id for its whole life (rs_, msg_, fc_, ...)."""

    index: int
    item_id: str
    kind: ItemKind
    name: str | None = None  # calls: the function's name, without its namespace
    namespace: str | None = None
    call_id: str | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # messages


@dataclass(frozen=True, slots=True)
class ItemDelta:
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemClosed:
    """``token_ids``: the harmony message behind the item (header included), kept for exact replay."""

    index: int
    status: ItemStatus = "completed"
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """``stop_reason``: the stop string or extra stop token id that ended it (vLLM's field)."""

    reason: EndReason
    usage: Usage
    stop_reason: str | int | None = None
    error: ChoraleError | None = None
    num_repairs: int = 0
    repairs: dict[str, int] = field(default_factory=dict)


OutputEvent = ItemOpened | ItemDelta | ItemClosed | TurnEnded
