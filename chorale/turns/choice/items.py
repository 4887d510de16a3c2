"""ItemWriter: converts harmony messages of one choice to output items.

Messages are routed by recipient, not by channel: ``functions.*`` is a function call on any channel. Items
open when the header is complete and close exactly once, whatever the model does.
"""

from __future__ import annotations

from chorale.harmony.messages import MessageStart
from chorale.ids import new_id
from chorale.turns.choice.emitter import Emitter
from chorale.turns.choice.item import OpenItem
from chorale.turns.choice.partial_json import InputReader
from chorale.turns.choice.stops import StopFilter
from chorale.turns.choice.tool_use import ToolUse
from chorale.turns.events import (
    BUILTIN_ITEMS,
    CLIENT_CALLS,
    ID_PREFIX,
    ItemKind,
    ItemOpened,
    ItemStatus,
    Phase,
)
from chorale.turns.functions import FUNCTION_PREFIX
from chorale.turns.request import TurnRequest


class ItemWriter:
    """``answered``: an item visible to readers was opened; ``called``: a call for the client is complete."""

    def __init__(self, request: TurnRequest, out: Emitter, tools: ToolUse | None) -> None:
        self.answered = False
        self.called = False
        self._request = request
        self._out = out
        self._tools = tools
        self._functions = request.rules.callable_names
        self._call_forms = request.rules.call_forms

    @property
    def tool_names(self) -> list[str]:
        """Recipients that the model may name, to which damaged ones are repaired."""
        names = [FUNCTION_PREFIX + name for name in sorted(self._functions)]
        return names if self._tools is None else [*names, *self._tools.names]

    def new_answer(self) -> None:
        """Resets ``answered`` after a tool has run: earlier text does not answer its result."""
        self.answered = False

    def open(self, start: MessageStart) -> None:
        """Opens the item of a message."""
        if self._tools is not None and not self._is_function(start) and self._tools.open_call(start):
            return
        kind, name, phase = self._route(start)
        form = self._call_forms.get(name) if name is not None else None
        namespace = None
        if form is not None:
            kind, name, namespace = form.kind, form.name, form.namespace
        item = OpenItem(
            self._out.new_index(),
            kind,
            self._stop_filter() if phase == "final_answer" else None,
            InputReader() if form is not None and form.wrapped else None,
            self._tools.citation_stream() if kind == "message" and self._tools is not None else None,
        )
        self.answered = self.answered or kind != "reasoning"
        call_id = new_id("call") if kind in CLIENT_CALLS else None
        item_id = new_id(ID_PREFIX[kind])
        self._out.open(item, ItemOpened(item.index, item_id, kind, name, namespace, call_id, phase))

    def _stop_filter(self) -> StopFilter | None:
        request = self._request
        if not request.stop:
            return None
        num_early = request.sampling.min_tokens - len(self._out.sampled)
        return StopFilter(request.stop, request.include_stop, num_early)

    def _is_function(self, start: MessageStart) -> bool:
        """Returns whether it is a call for the client.

        A bare name that a built-in tool has too means that tool.
        """
        recipient = start.recipient
        if recipient is None or recipient.removeprefix(FUNCTION_PREFIX) not in self._functions:
            return False
        return recipient.startswith(FUNCTION_PREFIX) or self._tools is None or not self._tools.owns(recipient)

    def _route(self, start: MessageStart) -> tuple[ItemKind, str | None, Phase | None]:
        recipient = start.recipient
        if recipient is not None:
            name = recipient.removeprefix(FUNCTION_PREFIX)
            if name in self._functions:
                return "function_call", name, None
            # Not a tool of this request: its text is shown, and the repair is counted.
            self._out.count_repair("undeclared_recipient")
            if self._tools is not None:
                return "reasoning", None, None  # arguments of a call that can no longer run
        if start.channel == "analysis":
            return "reasoning", None, None
        return "message", None, "commentary" if start.channel == "commentary" else "final_answer"

    def close(self, status: ItemStatus, token_ids: tuple[int, ...] = ()) -> None:
        """Closes the open item, if any."""
        item = self._out.item
        if item is None:
            return
        item.release()
        if item.kind in BUILTIN_ITEMS and item.kind != "mcp_approval_request":
            status = "incomplete"  # its tool has not finished
        if item.kind in CLIENT_CALLS and status == "completed":
            self.called = True
            if item.is_blank and item.kind != "custom_tool_call":
                item.add_text("{}")  # a call without arguments is still a JSON object
        self._out.close(status, token_ids)
