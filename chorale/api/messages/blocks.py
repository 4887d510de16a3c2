"""Blocks and other parts of a message object, for the body and the events."""

from __future__ import annotations

from typing import Any

from chorale.api.reasoning_tokens import write_reasoning
from chorale.harmony.json_text import MAX_CALL_DEPTH, read_object
from chorale.turns.events import CLIENT_CALLS, EndReason, FoldedItem, ItemOpened, TurnEnded, Usage

_STOPS: dict[EndReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def stops(ended: TurnEnded | None) -> dict[str, Any]:
    """Returns ``stop_reason`` and ``stop_sequence``, both null until the message is complete."""
    if ended is None:
        return {"stop_reason": None, "stop_sequence": None}
    if isinstance(ended.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_reason}
    return {"stop_reason": _STOPS[ended.reason], "stop_sequence": None}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Returns the usage, with cached input tokens counted separately."""
    return {
        "input_tokens": usage.input_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def opened_block(opened: ItemOpened) -> dict[str, Any]:
    """Returns the block of an opened item, still without its text."""
    if opened.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if opened.kind in CLIENT_CALLS:
        return {
            "type": "tool_use",
            "id": opened.call_id,
            "name": opened.name,
            "input": {},
            "caller": {"type": "direct"},
        }
    return {"type": "text", "text": ""}  # no ``citations``: Anthropic omits the key without citations


def finished_block(item: FoldedItem, *, omits_thinking: bool) -> dict[str, Any] | None:
    """Returns the block of an item, or None for empty text, which the API does not allow."""
    block = opened_block(item.opened)
    if item.kind == "reasoning":
        block["thinking"] = "" if omits_thinking else item.text
        block["signature"] = write_reasoning(item.content_token_ids)
    elif item.kind in CLIENT_CALLS:
        block["input"] = call_input(item.text)
    else:
        if not item.text:
            return None
        block["text"] = item.text
    return block


def call_input(text: str) -> dict[str, Any]:
    """Returns a call's arguments as an object, or {} if they are invalid, such as when truncated."""
    return read_object(text, max_depth=MAX_CALL_DEPTH)
