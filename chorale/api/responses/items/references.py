"""Looks up input items in the store: references, and items that the model produced."""

from __future__ import annotations

from chorale.api.http.offload import beside, is_heavy
from chorale.api.reasoning_tokens import ReasoningReader
from chorale.api.responses.items.built_in import BUILT_IN_INPUT
from chorale.api.responses.items.client_calls import call_text, called_name, is_call
from chorale.api.responses.items.to_harmony import item_text
from chorale.errors import NotFoundError
from chorale.harmony.vocab import Vocabulary
from chorale.store.protocol import Item, StoredItem
from chorale.store.store import ResponseStore

HEAVY_ITEMS = 64  # more are resolved in a thread, as a few kB of encrypted_content can unpack to megabytes


async def resolve_items(
    store: ResponseStore, vocab: Vocabulary, items: list[Item], owner: bytes, path: str = "input"
) -> list[StoredItem]:
    """Replaces references with the stored items, and adds token ids to items that the model produced."""
    wanted = [
        item["id"]
        for item in items
        if item["type"] in ("item_reference", "reasoning")
        or is_call(item)
        or item["type"] in BUILT_IN_INPUT
        or item.get("role") == "assistant"
    ]
    found = await store.items(wanted, owner) if wanted else {}

    def resolve() -> list[StoredItem]:
        reasoning = ReasoningReader(vocab)
        return [
            _resolve(item, found.get(item["id"]), f"{path}[{i}]", reasoning) for i, item in enumerate(items)
        ]

    return await beside(resolve, heavy=len(items) > HEAVY_ITEMS or is_heavy(items))


def _resolve(item: Item, stored: StoredItem | None, path: str, reasoning: ReasoningReader) -> StoredItem:
    if item["type"] == "item_reference":
        if stored is None:
            raise NotFoundError(
                f"{path}: no item with id {item['id'][:128]!r} is stored",
                param=f"{path}.id",
                code="item_not_found",
            )
        return stored
    if stored is not None and _is_same(stored.item, item):
        return stored
    if item["type"] == "reasoning":
        text = item_text(item)
        read = reasoning.read(item.get("encrypted_content"), text, f"{path}.encrypted_content")
        if read is not None:
            content = item["content"] if text else [{"type": "reasoning_text", "text": read[0]}]
            return StoredItem({**item, "content": content}, read[1])
    return StoredItem(item)


# Fields of calls to built-in tools that must be equal.
_COMPARED = {
    "code_interpreter_call": ("code",),
    "mcp_call": ("server_label", "name", "arguments"),
    "mcp_approval_request": ("server_label", "name", "arguments"),
}


def _is_same(stored: Item, given: Item) -> bool:
    """Returns whether a client's item equals the model's output, so that its exact tokens can be replayed.

    Reasoning may be empty: clients that keep only ``encrypted_content`` strip it.
    """
    kind = given["type"]
    if stored["type"] != kind:
        return False
    if is_call(given):
        return _call(stored) == _call(given)
    if kind == "web_search_call":
        return _is_same_action(stored["action"], given["action"])
    if kind in BUILT_IN_INPUT:
        return all(stored[key] == given[key] for key in _COMPARED.get(kind, ()))
    if kind == "reasoning":
        return item_text(given) in ("", item_text(stored))
    is_output = kind == "message" and stored["role"] == given["role"] == "assistant"
    return is_output and item_text(stored) == item_text(given)


def _call(item: Item) -> tuple[str, str, str]:
    return item["call_id"], called_name(item), call_text(item)


def _is_same_action(stored: Item, given: Item) -> bool:
    """Optional parts may be missing in the client's action."""
    optional = ("sources", "queries")
    parts = {name: value for name, value in stored.items() if name not in optional and value is not None}
    return all(given.get(name) == value for name, value in parts.items())
