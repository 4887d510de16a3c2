"""ToolUse: the calls of one choice to its built-in tools, and their limits.

It runs nothing. A call is opened like any item; once its text is complete, ``take_call`` returns it as a
``CallTool``, and ``done`` closes the item with the result. A call to a tool that does not exist is answered
with an error for the model.
"""

from __future__ import annotations

from typing import Any

from chorale.harmony.messages import MessageStart
from chorale.harmony.vocab import CALL
from chorale.ids import new_id
from chorale.tools.contract import CitationStream, McpDetail, ToolCall, ToolIdentity, ToolKind, ToolResult
from chorale.turns.built_in.open import ApprovedCall, TurnTools
from chorale.turns.choice.emitter import Emitter
from chorale.turns.choice.item import OpenItem, WrittenCall
from chorale.turns.choice.runaway import CallWatch
from chorale.turns.events import (
    ID_PREFIX,
    ItemClosed,
    ItemDelta,
    ItemKind,
    ItemOpened,
    ItemStatus,
    ToolOutcome,
    ToolStarted,
)
from chorale.turns.functions import FUNCTION_PREFIX
from chorale.turns.needs import CallTool
from chorale.turns.rules import TurnRules

MAX_CALLS = 128  # per turn, regardless of the request: unattended loops must end
MAX_UNKNOWN = 3  # calls to tools that do not exist, answered with an error; then the answer is forced

_KINDS: dict[ToolKind, ItemKind] = {
    "browser": "web_search_call",
    "python": "code_interpreter_call",
    "mcp": "mcp_call",
}


class ToolUse:
    """One per choice with built-in tools; the only writer of its call counts."""

    def __init__(self, tools: TurnTools, rules: TurnRules, out: Emitter) -> None:
        self._tools = tools
        self._box = tools.box
        self._rules = rules
        self._out = out
        self._num_calls = 0
        self._num_unknown = 0
        self._watch = CallWatch()

    # ------------------------------------------------------------------ allowed calls

    @property
    def names(self) -> list[str]:
        """Full names of the tools that may be called."""
        return sorted(filter(self._may_call, self._box.recipients))

    def owns(self, recipient: str) -> bool:
        return self._box.owns(recipient)

    def citation_stream(self) -> CitationStream | None:
        """Returns a filter for a message's text if citation marks become links."""
        return self._box.citation_stream() if self._tools.cites else None

    def state(self) -> dict[str, Any]:
        """Returns the state for the next turn of the conversation."""
        return {"session": self._tools.session_key, "box": self._box.state()}

    def grammar(self, max_tokens: int | None, num_reasoning_tokens: int) -> str:
        """Returns the grammar of a round after a tool. ``max_tokens``: the rest of the output."""
        return self._rules.later_grammar(self._num_calls, self._calls_left, num_reasoning_tokens, max_tokens)

    @property
    def _calls_left(self) -> bool:
        limit = MAX_CALLS if self._tools.max_calls is None else min(self._tools.max_calls, MAX_CALLS)
        return not self._watch.repeats and self._num_calls < limit

    def _may_call(self, recipient: str) -> bool:
        return self._rules.later(self._num_calls).may_use(recipient)

    def _takes(self, recipient: str) -> bool:
        """Returns whether a call is run or answered with an error; otherwise its text is reasoning."""
        if not self._calls_left or self._num_unknown >= MAX_UNKNOWN:
            return False
        return self._may_call(recipient) or recipient not in self._box.recipients

    # ------------------------------------------------------------------ items

    def show_listings(self) -> None:
        """Emits an item for each list of an MCP server's tools."""
        for listing in self._tools.listings:
            index = self._out.new_index()
            opened = ItemOpened(index, new_id("mcpl"), "mcp_list_tools", namespace=listing.server_label)
            status: ItemStatus = "completed" if listing.error is None else "failed"
            self._out.emit(opened, ToolOutcome(index, listing), ItemClosed(index, status))

    def open_call(self, start: MessageStart) -> bool:
        """Opens the item of a call to a built-in tool. Returns False if it is not such a call."""
        recipient = start.recipient
        if recipient is None or not self._takes(recipient):
            return False
        index = self._out.new_index()
        identity = self._box.identify(recipient) if self._may_call(recipient) else None
        if identity is None:
            self._out.count_repair("undeclared_recipient")
            opened = ItemOpened(index, new_id("rs"), "reasoning")
        else:
            opened = self._opened(index, identity)
        call = WrittenCall(recipient, start.channel, identity, opened.item_id)
        self._out.open(OpenItem(index, opened.kind, call=call), opened)
        return True

    def _opened(self, index: int, identity: ToolIdentity) -> ItemOpened:
        kind = _KINDS[identity.kind]
        if kind == "mcp_call" and identity.needs_approval:
            kind = "mcp_approval_request"
        return ItemOpened(
            index=index,
            item_id=new_id(ID_PREFIX[kind]),
            kind=kind,
            name=identity.name,
            namespace=identity.server_label if identity.kind == "mcp" else None,
            container_id=self._box.container_id if kind == "code_interpreter_call" else None,
        )

    def take_call(self, item: OpenItem, token_ids: tuple[int, ...], prompt: list[int]) -> CallTool:
        """Returns the complete call. ``prompt``: everything up to it, including its tokens."""
        call = item.call
        assert call is not None
        item.release()
        self._out.flush()
        refusal = None
        if call.identity is None:
            refusal = self._unknown(call.recipient)
            self._out.emit(urgent=True)
        else:
            self._out.emit(ToolStarted(item.index), urgent=True)
        return CallTool(
            call=ToolCall(call.recipient, "".join(call.texts), call.item_id),
            channel=call.channel,
            prompt_token_ids=[*prompt, CALL],
            index=item.index,
            token_ids=token_ids,
            identity=call.identity,
            refusal=refusal,
        )

    def _unknown(self, recipient: str) -> ToolResult:
        names = [*self.names, *sorted(FUNCTION_PREFIX + name for name in self._rules.callable_names)]
        offer = f"You can call: {', '.join(names)}." if names else "Answer without tools."
        text = f"Error: the tool {recipient} does not exist. {offer}"
        return ToolResult(recipient, text, True, McpDetail("", recipient, "", None, text))

    def open_approved(self, approved: ApprovedCall, number: int, prompt: list[int]) -> CallTool:
        """Opens an earlier turn's call that the user has since approved."""
        index, item_id = self._out.new_index(), new_id("mcp")
        opened = ItemOpened(
            index,
            item_id,
            "mcp_call",
            name=approved.name,
            namespace=approved.server_label,
            approval_request_id=approved.request_id,
        )
        self._out.open(OpenItem(index, "mcp_call"), opened)
        self._out.emit(ItemDelta(index, approved.arguments), ToolStarted(index))
        return CallTool(
            call=ToolCall(approved.recipient, approved.arguments, item_id),
            channel="commentary",
            prompt_token_ids=[*prompt, *approved.token_ids, CALL],
            index=index,
            token_ids=approved.token_ids,
            identity=ToolIdentity("mcp", approved.server_label, approved.name),
            approved=number,
        )

    def done(self, call: CallTool, result: ToolResult, message: list[int]) -> None:
        """Counts the call and closes its item. ``message``: the result as harmony, ``<|end|>`` included."""
        status: ItemStatus = "completed"
        if call.identity is None:
            self._num_unknown += 1
        else:
            self._num_calls += 1
            self._watch.called(call.call.recipient, call.call.content, result.content)
            status = "failed" if result.failed else "completed"
            self._out.emit(ToolOutcome(call.index, result))
        self._out.emit(urgent=True)
        self._out.close(status, (*call.token_ids, CALL, *message[:-1]))
