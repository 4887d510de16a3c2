"""Conversion of items to a harmony conversation and to prompt token ids.

Order: system, developer (instructions, leading system and developer texts, tools), then the items of the
history and of the input. Only this request's ``instructions`` apply. The model's output is replayed from its
exact token ids, so the prompt of the second turn begins with the prompt and output of the first. The outputs
of a call follow it directly, regardless of the order in which the client sent them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from chorale.api.limits import SIZES
from chorale.api.responses.items.built_in import (
    BUILT_IN_CALLS,
    BUILT_IN_INPUT,
    approvals,
    built_in_messages,
    built_in_text,
)
from chorale.api.responses.items.client_calls import (
    OUTPUTS,
    call_message,
    call_text,
    called_name,
    is_call,
    output_message,
    output_text,
)
from chorale.api.responses.items.encrypted_content import unpack, unseal
from chorale.api.responses.tools import read_functions
from chorale.errors import ContextLengthError, RequestError
from chorale.harmony.messages import (
    FUNCTIONS,
    Channel,
    DeveloperContent,
    Message,
    ReasoningEffort,
    ToolNamespace,
)
from chorale.harmony.render import kept_messages, render_conversation, render_message
from chorale.harmony.vocab import Vocabulary
from chorale.requests.effort import take_effort
from chorale.requests.prompt import at
from chorale.store.protocol import Item, StoredItem
from chorale.turns.events import CLIENT_CALLS

Group = list[Message]  # messages that are kept or dropped together


def item_text(item: Item) -> str:
    """Returns all text of an item; for a call, its arguments."""
    if is_call(item):
        return call_text(item)
    if item["type"] in OUTPUTS:
        return output_text(item)
    if item["type"] in ("additional_tools", "compaction_trigger"):
        return ""
    if item["type"] == "compaction":
        return unseal(item["encrypted_content"], "encrypted_content") or ""
    if item["type"] in BUILT_IN_INPUT:
        return built_in_text(item)
    parts = (
        (item.get("content") or item.get("summary") or []) if item["type"] == "reasoning" else item["content"]
    )
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


@dataclass(frozen=True, slots=True)
class Stripped:
    """A conversation without the effort lines of its instructions and developer messages."""

    instructions: str | None
    items: list[StoredItem]
    effort: ReasoningEffort | None  # from the last effort line


def take_efforts(instructions: str | None, items: Sequence[StoredItem]) -> Stripped:
    """Removes effort lines. Does not modify the stored items."""
    kept, effort = list(items), None
    for position, stored in enumerate(items):
        if stored.item["type"] != "message" or stored.item["role"] not in ("system", "developer"):
            continue
        text, found = take_effort(item_text(stored.item))
        if found is not None:
            parts = [{"type": "input_text", "text": text}] if text else []
            kept[position], effort = replace(stored, item={**stored.item, "content": parts}), found
    text, found = take_effort(instructions or "")
    return Stripped(text or None, kept, found or effort)


def split_instructions(instructions: str | None, items: Sequence[StoredItem]) -> tuple[str | None, int]:
    """Joins the instructions with leading system and developer texts. Returns text and item count."""
    texts = [instructions] if instructions else []
    count = 0
    for stored in items:
        if stored.item["type"] != "message" or stored.item["role"] not in ("system", "developer"):
            break
        count += 1
        text = item_text(stored.item)
        if text:
            texts.append(text)
    return ("\n\n".join(texts) or None), count


def to_groups(items: Sequence[StoredItem], freeform: Collection[str] = ()) -> list[Group]:
    """Returns a group per item. Outputs join the group of their call, which must exist (``check_outputs``).

    ``freeform``: prompt names of tools whose calls consist of plain input.
    """
    is_preamble = preambles(items)
    answers, called = approvals(items)
    groups: list[Group] = []
    calls: dict[str, tuple[str, Group]] = {}  # call_id -> (name in the prompt, its group)
    for position, stored in enumerate(items):
        item = stored.item
        if item["type"] in OUTPUTS:
            _add_output(item, calls)
            continue
        if item["type"] in BUILT_IN_INPUT:
            if exchange := built_in_messages(stored, answers, called):
                groups.append(exchange)
            continue
        if item["type"] == "compaction":
            groups.append(_compaction(item))
            continue
        message = _message(stored, is_preamble[position], freeform)
        if message is None:
            continue
        group = [message]
        groups.append(group)
        if is_call(item):
            calls[item["call_id"]] = (called_name(item), group)
    return groups


def check_outputs(items: Sequence[StoredItem], num_history: int = 0) -> None:
    """Raises ``RequestError`` for an output that does not follow its call.

    ``items[num_history:]`` are the request's ``input``; errors contain their indices.
    """
    calls: set[str] = set()
    for position, stored in enumerate(items):
        item = stored.item
        if is_call(item):
            calls.add(item["call_id"])
        elif item["type"] in OUTPUTS and item["call_id"] not in calls:
            is_own = position >= num_history
            kind = item["type"].replace("_", " ")
            raise RequestError(
                f"No tool call found for {kind} with call_id {item['call_id'][:128]}.",
                param=f"input[{position - num_history}].call_id" if is_own else "input",
            )


def _add_output(item: Item, calls: dict[str, tuple[str, Group]]) -> None:
    name, group = calls[item["call_id"]]
    group.append(output_message(item, name))
    if item["type"] == "tool_search_output":
        group.append(_tools_message(item))


def _tools_message(item: Item) -> Message:
    """Returns the message that declares tools at their position within the input."""
    functions, about = read_functions(item["tools"], "input.tools")
    tools = tuple(function.tool for function in functions)
    namespaces = (ToolNamespace(FUNCTIONS, about, tools),) if tools else ()
    return Message("developer", DeveloperContent(None, namespaces))


def preambles(items: Sequence[StoredItem]) -> list[bool]:
    """Returns which assistant messages are preambles, by their phase or, without one, if a call follows."""
    found = [False] * len(items)
    following = ""  # type of the next item that is not reasoning
    for position in range(len(items) - 1, -1, -1):
        item = items[position].item
        if item["type"] == "message" and item["role"] == "assistant":
            phase = item.get("phase")
            found[position] = phase == "commentary" or (
                phase is None and following in CLIENT_CALLS | BUILT_IN_CALLS
            )
        if item["type"] != "reasoning":
            following = item["type"]
    return found


def _compaction(item: Item) -> Group:
    summary, unanswered = unpack(item_text(item))
    summary = f"Summary of the conversation before this:\n\n{summary}"
    return [Message("developer", DeveloperContent(summary)), *(Message("user", text) for text in unanswered)]


def _message(stored: StoredItem, is_preamble: bool, freeform: Collection[str]) -> Message | None:
    item, token_ids = stored.item, stored.token_ids or None
    if is_call(item):
        return call_message(item, token_ids, freeform)
    if item["type"] == "additional_tools":
        return _tools_message(item)
    if item["type"] == "compaction_trigger":
        return None
    text = item_text(item)
    if item["type"] == "reasoning":
        # Omit reasoning that another server encrypted, or whose text the client removed.
        return (
            Message("assistant", text, channel="analysis", token_ids=token_ids) if text or token_ids else None
        )
    role = item["role"]
    if role in ("system", "developer"):
        return Message("developer", DeveloperContent(text)) if text else None
    if role == "user":
        return Message("user", text)
    channel: Channel = "commentary" if is_preamble else "final"
    return Message("assistant", text, channel=channel, token_ids=token_ids)


# --------------------------------------------------------------------------- to token ids


_MOST = SIZES["prompt_tokens"].max


@dataclass(frozen=True, slots=True)
class Window:
    """The context window: ``max_len`` tokens, of which truncation keeps ``reserve`` for the answer."""

    max_len: int
    reserve: int
    truncate: bool


def encode(
    head: Sequence[Message], groups: Sequence[Group], vocab: Vocabulary, drop_analysis: bool, window: Window
) -> list[int]:
    """Returns the token ids of the prompt.

    ``window.truncate`` drops the oldest groups until the rest fits. Raises ``ContextLengthError``.
    """

    def render(kept: Sequence[Group]) -> list[int]:
        messages = (*head, *(message for group in kept for message in group))
        with at("input"):
            return render_conversation(messages, vocab, drop_analysis=drop_analysis, most=_MOST)

    try:
        prompt = render(groups)
    except ContextLengthError:
        if not window.truncate:
            raise
    else:
        if len(prompt) < window.max_len or not window.truncate:
            return prompt
    kept = _newest_that_fit(groups, vocab, drop_analysis, window, render)
    return render(kept)


def _newest_that_fit(
    groups: Sequence[Group],
    vocab: Vocabulary,
    drop_analysis: bool,
    window: Window,
    render: Callable[[Sequence[Group]], list[int]],
) -> Sequence[Group]:
    """Returns the newest groups that fit, after the head (system, developer), which is always kept."""
    max_len, room = window.max_len, window.max_len - window.reserve
    messages = [message for group in groups for message in group]
    shown = set(map(id, kept_messages(messages) if drop_analysis else messages))
    total, start = len(render([])), len(groups)
    while start > 0:
        try:
            size = sum(len(render_message(m, vocab, most=_MOST)) for m in groups[start - 1] if id(m) in shown)
        except ContextLengthError:
            break
        if total + size > room:
            break
        total, start = total + size, start - 1
    if start == len(groups):
        raise ContextLengthError(
            f"This model's maximum context length is {max_len} tokens; the newest item does not fit "
            f"even alone ({room} tokens are left)",
            param="input",
        )
    return groups[start:]
