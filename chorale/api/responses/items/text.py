"""item_text: returns the text of any item of a conversation."""

from __future__ import annotations

from chorale.api.responses.items import built_in as built_in_items
from chorale.api.responses.items import client_calls
from chorale.api.responses.items.encrypted_content import unseal
from chorale.store.protocol import Item


def item_text(item: Item) -> str:
    """Returns all text of an item; for a call, its arguments."""
    if client_calls.is_call(item):
        return client_calls.call_text(item)
    if item["type"] in client_calls.OUTPUTS:
        return client_calls.output_text(item)
    if item["type"] in ("additional_tools", "compaction_trigger"):
        return ""
    if item["type"] == "compaction":
        return unseal(item["encrypted_content"], "encrypted_content") or ""
    if item["type"] in built_in_items.BUILT_IN_INPUT:
        return built_in_items.built_in_text(item)
    parts = (
        (item.get("content") or item.get("summary") or []) if item["type"] == "reasoning" else item["content"]
    )
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)
