"""OutputEvents: the event stream that every endpoint translates.

``run_turn`` yields these; the translators of Responses, Chat Completions and Completions render them as SSE
chunks, and non-streaming bodies are folds of the same events. Ids, usage and status are decided here, once,
so that stream and body cannot disagree.

Item ``index`` counts from 0 within one choice; an item is opened, gets deltas, and is closed exactly once;
``TurnEnded`` is last, exactly once. The concatenated text of all deltas is the item's final text.

Events with a tag are stored (``chorale.api.responses.event_log``): new fields of theirs, and of the values
in them, must come last and have a default. Tags never change. A delta's is short: there is one per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from chorale.engine.types import ALL_FORBIDDEN, ChunkTimings, TokenLogprobs
from chorale.errors import ChoraleError, EngineDeadError, EngineError, RequestError
from chorale.tools.contract import McpListing, Progress, ToolResult, UrlCitation

ItemKind = Literal[
    "reasoning", "message", "function_call", "custom_tool_call", "local_shell_call", "shell_call",
    "apply_patch_call", "tool_search_call", "web_search_call", "code_interpreter_call", "mcp_call",
    "mcp_list_tools", "mcp_approval_request", "compaction",
]  # fmt: skip
# Prefixes of the ids of items.
ID_PREFIX: dict[str, str] = {
    "reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc",
    "local_shell_call": "lsh", "shell_call": "sh", "apply_patch_call": "apc", "tool_search_call": "tsc",
    "web_search_call": "ws", "code_interpreter_call": "ci", "mcp_call": "mcp", "mcp_list_tools": "mcpl",
    "mcp_approval_request": "mcpr", "compaction": "cmp",
}  # fmt: skip
ItemStatus = Literal["completed", "incomplete", "failed"]
EndReason = Literal["stop", "length", "tool_calls", "abort", "error"]
Phase = Literal["commentary", "final_answer"]

# Separates texts of one kind (a preamble and the answer, two analyses) that are joined to one string.
SEPARATOR = "\n\n"
# Calls that the client runs: they end the turn. Their text is JSON arguments; of a custom call, its input.
CLIENT_CALLS: frozenset[ItemKind] = frozenset({
    "function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call",
    "tool_search_call",
})  # fmt: skip
# Items of built-in tools: the turn continues after them. Their text is what the model wrote for the tool.
BUILTIN_ITEMS: frozenset[ItemKind] = frozenset(
    {"web_search_call", "code_interpreter_call", "mcp_call", "mcp_list_tools", "mcp_approval_request"}
)


@dataclass(slots=True)
class Usage:
    """Token counts of one turn. ``reasoning_tokens`` are analysis content tokens only."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    # The input of rounds after the first, and its cached part. Both are included above.
    later_input_tokens: int = 0
    later_cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def tool_output_tokens(self) -> int:
        """Returns the tokens that built-in tools, and the frames of their results, added to the prompt."""
        return self.later_input_tokens - self.later_cached_tokens

    def copy(self) -> Usage:
        return replace(self)

    def add(self, other: Usage) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class ItemOpened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """An output item began. ``item_id`` is its permanent id (rs_, msg_, fc_, ...)."""

    index: int
    item_id: str
    kind: ItemKind
    name: str | None = None  # calls: the function's name, without its namespace
    namespace: str | None = None  # MCP items: the server's label
    call_id: str | None = None
    phase: Phase | None = None  # messages only
    container_id: str | None = None  # code_interpreter_call
    approval_request_id: str | None = None  # mcp_call: the request that was approved


class ItemDelta(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=0):
    """More text. ``token_ids``: the content tokens that became readable with it (may be empty)."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


class ItemClosed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """``token_ids``: the harmony message of the item (header included), kept for exact replay.

    For a built-in call that ran: the call, ``<|call|>``, and the whole message of its result.
    """

    index: int
    status: ItemStatus = "completed"
    token_ids: tuple[int, ...] = ()


class ToolStarted(msgspec.Struct, frozen=True, array_like=True, tag="tool_started"):
    """A call to a built-in tool is complete, and the tool begins to run."""

    index: int


class ToolProgressed(msgspec.Struct, frozen=True, array_like=True, tag="tool_progressed"):
    """Progress of a running tool."""

    index: int
    progress: Progress


class ToolOutcome(msgspec.Struct, frozen=True, array_like=True, tag="tool_outcome"):
    """The result of a built-in tool; at most once, before its item closes."""

    index: int
    result: ToolResult | McpListing


class Cited(msgspec.Struct, frozen=True, array_like=True, tag="cited"):
    """A citation within the text of the open message so far."""

    index: int
    citation: UrlCitation


@dataclass(frozen=True, slots=True)
class TurnProgress:
    """Only if ``TurnRequest.progress`` is set: all tokens since the last one, headers included."""

    token_ids: tuple[int, ...]
    usage: Usage  # a copy
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if requested


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Raw completions only, before the first item: the prompt's log-probabilities, for ``echo``."""

    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """``stop_reason``: the stop string or extra stop token id that ended it (vLLM's field)."""

    reason: EndReason
    usage: Usage
    stop_reason: str | int | None = None
    error: ChoraleError | None = None
    repairs: dict[str, int] = field(default_factory=dict)
    output_token_ids: tuple[int, ...] = ()  # every sampled token, headers and terminators included
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    routed_experts: tuple[bytes, ...] = ()  # see ``turns.routed_experts``
    weight_versions: tuple[tuple[str, int, int], ...] = ()  # label, first token, end; (): not known
    tool_state: dict[str, Any] | None = None  # for the built-in tools of the next turn
    timings: ChunkTimings | None = None  # start: first round's; last token: last round's


OutputEvent = (
    ItemOpened | ItemDelta | ItemClosed | ToolStarted | ToolProgressed | ToolOutcome | Cited | TurnProgress
    | PromptScored | TurnEnded
)  # fmt: skip


def chunk_error(text: str | None) -> ChoraleError:
    """Returns the error of a chunk that ended with one. An invalid request is a 400."""
    if text == ALL_FORBIDDEN:
        return RequestError(text, code="unsatisfiable_constraints")
    return EngineError(text or "the engine could not finish the request")


def end_error(ended: TurnEnded) -> ChoraleError | None:
    """Returns the error that a turn ended with; an abort that the client did not request is an error."""
    if ended.reason == "abort":
        return EngineDeadError("the request was aborted before it ended", code="aborted")
    return ended.error if ended.reason == "error" else None


# --------------------------------------------------------------------------- the fold


@dataclass(slots=True)
class FoldedItem:
    """A finished item: its opening and all of its deltas."""

    opened: ItemOpened
    status: ItemStatus | None = None  # None while it is open
    text: str = ""
    content_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: tuple[int, ...] = ()  # the harmony message, header included
    citations: list[UrlCitation] = field(default_factory=list)
    outcome: ToolResult | McpListing | None = None
    _parts: list[str] = field(default_factory=list)

    @property
    def text_so_far(self) -> str:
        """Returns the text of a closed item, or what has arrived of an open one."""
        return self.text + "".join(self._parts)

    @property
    def item_id(self) -> str:
        return self.opened.item_id

    @property
    def kind(self) -> ItemKind:
        return self.opened.kind


class Fold:
    """Folds the events of one choice into the non-streaming result. Feed it every event, in order."""

    __slots__ = ("ended", "items", "scores")

    def __init__(self) -> None:
        self.items: list[FoldedItem] = []
        self.scores: list[TokenLogprobs] = []  # of all tokens, with ``TurnRequest.progress``
        self.ended: TurnEnded | None = None

    def add(self, events: Iterable[OutputEvent]) -> None:
        """Raises ``ValueError`` if the events violate the contract in the module's docstring."""
        for event in events:
            if self.ended is not None:
                raise ValueError("an event after TurnEnded")
            if isinstance(event, ItemDelta):
                item = self._open_item(event.index)
                item._parts.append(event.text)
                item.content_token_ids.extend(event.token_ids)
                item.logprobs.extend(event.logprobs)
            elif isinstance(event, ItemOpened):
                if event.index != len(self.items):
                    raise ValueError(f"item {event.index} opened out of order")
                self.items.append(FoldedItem(event))
            elif isinstance(event, ItemClosed):
                item = self._open_item(event.index)
                item.status, item.token_ids = event.status, event.token_ids
                item.text, item._parts = "".join(item._parts), []
            elif isinstance(event, TurnProgress):
                self.scores += event.logprobs
            elif isinstance(event, Cited):
                self._open_item(event.index).citations.append(event.citation)
            elif isinstance(event, ToolOutcome):
                self._open_item(event.index).outcome = event.result
            elif isinstance(event, TurnEnded):
                self._end(event)

    def _open_item(self, index: int) -> FoldedItem:
        if not 0 <= index < len(self.items) or self.items[index].status is not None:
            raise ValueError(f"item {index} is not open")
        return self.items[index]

    def _end(self, event: TurnEnded) -> None:
        if any(item.status is None for item in self.items):
            raise ValueError("the turn ended with an open item")
        self.ended = event

    def result(self) -> TurnEnded:
        """Returns the end of the choice. Raises the ``ChoraleError`` with which it ended."""
        if self.ended is None:
            raise EngineError("a choice did not end")
        if (error := end_error(self.ended)) is not None:
            raise error
        return self.ended

    def joined(self, kind: ItemKind) -> str | None:
        """Returns the texts of one kind as one string, or None if there are no texts."""
        return SEPARATOR.join(item.text for item in self.items if item.kind == kind and item.text) or None

    def text(self, kind: ItemKind) -> str:
        """Returns the texts of all items of one kind, in order."""
        return "".join(item.text for item in self.items if item.kind == kind)
