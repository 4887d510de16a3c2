"""Compaction items in a conversation: their contents, the items they replace, and when one is created.

A compaction item has a summary and the user's last messages verbatim, if they are unanswered. It replaces
everything before it except leading system and developer messages and tools declared within the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chorale.api.responses.items.client_calls import OUTPUTS, TOOL_LISTS, is_call
from chorale.api.responses.items.encrypted_content import compaction_object, pack, unpack
from chorale.api.responses.items.to_harmony import Group, item_text, preambles, split_instructions
from chorale.api.responses.request import ResponsesRequest
from chorale.harmony.vocab import Vocabulary
from chorale.ids import new_id
from chorale.store.protocol import Item, StoredItem
from chorale.turns.compaction import Compaction, ask_message, ask_tokens

TRIGGER = "compaction_trigger"


def since_compaction(items: Sequence[StoredItem]) -> Sequence[StoredItem]:
    """Returns the items without those that the newest compaction replaces."""
    newest = max((i for i, stored in enumerate(items) if stored.item["type"] == "compaction"), default=0)
    if newest == 0:
        return items
    _, num_leading = split_instructions(None, items)
    middle, after = items[num_leading:newest], items[newest:]
    answered = {stored.item["call_id"] for stored in after if stored.item["type"] in OUTPUTS}
    tools = [_declarations(stored.item) for stored in middle if stored.item["type"] in TOOL_LISTS]
    calls = [stored for stored in middle if is_call(stored.item) and stored.item["call_id"] in answered]
    return [*items[:num_leading], *tools, after[0], *calls, *after[1:]]


def _declarations(item: Item) -> StoredItem:
    """Converts a list of tools to ``additional_tools``, because its call has been replaced."""
    return StoredItem(
        {"id": item["id"], "type": "additional_tools", "role": "developer", "tools": item["tools"]}
    )


def unanswered(items: Sequence[StoredItem]) -> tuple[str, ...]:
    """Returns the texts of the user's last messages, if no answer follows them."""
    is_preamble = preambles(items)
    texts: list[str] = []
    for position in range(len(items) - 1, -1, -1):
        item = items[position].item
        if item["type"] == "message" and item["role"] == "user":
            texts.insert(0, item_text(item))
            continue
        if item["type"] == "compaction" and not texts:
            return unpack(item_text(item))[1]
        answered = item["type"] == "message" and item["role"] == "assistant" and not is_preamble[position]
        if texts or answered:
            break
    return tuple(texts)


def plan(
    request: ResponsesRequest,
    items: Sequence[StoredItem],
    groups: Callable[[Sequence[StoredItem]], Sequence[Group]],
    render: Callable[[Sequence[Group], bool], list[int]],
    vocab: Vocabulary,
    max_len: int,
) -> Compaction | None:
    """Returns how the turn compacts its conversation, if requested.

    ``groups``: converts items to groups, without those that a compaction replaces. ``render``: converts
    groups to a prompt, which may be truncated to leave room for a summary.
    """
    threshold = request.compact_threshold(max_len)
    triggered = bool(items) and items[-1].item["type"] == TRIGGER
    if threshold is None and not triggered:
        return None
    kept = unanswered(since_compaction(items))
    shown = groups(items)
    due = triggered or (len(shown) > len(kept) and len(render(shown, False)) >= (threshold or 0))

    def rebuild(packed: str) -> list[int]:
        return render(groups([*items, StoredItem(compaction_object(new_id("cmp"), packed))]), False)

    return Compaction(
        threshold=0 if triggered else threshold or 0,
        ask=ask_tokens(vocab),
        first_prompt=tuple(render([*shown, [ask_message()]], True)) if due else None,
        pack=lambda summary: pack(summary, kept),
        rebuild=rebuild,
        alone=triggered,
    )
