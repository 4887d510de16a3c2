"""Looks up input items in the store: references, and items that the model produced."""

from __future__ import annotations

from chorale.api.http.offload import beside, is_heavy
from chorale.api.reasoning_tokens import ReasoningReader
from chorale.api.responses.items.built_in import BUILT_IN_INPUT
from chorale.api.responses.items.client_calls import is_call
from chorale.api.responses.items.input import same_output
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
    if stored is not None and same_output(stored.item, item):
        return stored
    if item["type"] == "reasoning":
        text = item_text(item)
        read = reasoning.read(item.get("encrypted_content"), text, f"{path}.encrypted_content")
        if read is not None:
            content = item["content"] if text else [{"type": "reasoning_text", "text": read[0]}]
            return StoredItem({**item, "content": content}, read[1])
    return StoredItem(item)
