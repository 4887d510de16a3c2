"""The stream events of built-in tool items. Each kind has its events in this order:

* ``web_search_call``: added (with the query or URL, once the call begins), in_progress, searching, completed
  (once the tool has returned), done.
* ``code_interpreter_call``: added, in_progress, code deltas, code done, interpreting, completed, done.
* ``mcp_call``: added, in_progress, arguments deltas, arguments done, completed or failed, done.
* ``mcp_list_tools``: added, in_progress, completed or failed, done.
* ``mcp_approval_request``: added and done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chorale.api.responses.dialects import Event
from chorale.api.responses.items.built_in import action_object
from chorale.api.responses.items.objects import ResponseBuilder, is_void
from chorale.tools.contract import BrowserAction
from chorale.turns.events import FoldedItem, ItemClosed, OutputEvent, ToolOutcome, ToolProgressed, ToolStarted

# The stem of the events of each kind's text (``.delta``, ``.done``), and the key of the whole text.
TEXT_EVENTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
    "code_interpreter_call": ("response.code_interpreter_call_code", "code"),
    "mcp_call": ("response.mcp_call_arguments", "arguments"),
}


class BuiltInEvents:
    """The events of an item. ``shown``: whether ``output_item.added`` has been sent."""

    def __init__(self, builder: ResponseBuilder, item: FoldedItem, output_index: int) -> None:
        self._builder = builder
        self._item = item
        self._kind = item.kind
        self._index = output_index
        self._position = {"item_id": item.item_id, "output_index": output_index}
        self._text_done = False
        self.shown = False

    def open(self) -> Iterator[Event]:
        """Yields the events that follow the complete header of a call."""
        if self._kind in ("code_interpreter_call", "mcp_call", "mcp_list_tools"):
            yield self._added({})
            yield self._state("in_progress")

    def on_tool(self, event: OutputEvent) -> Iterator[Event]:
        if isinstance(event, ToolStarted):
            yield from self._written()
            if self._kind == "code_interpreter_call":
                yield self._state("interpreting")
        elif self._kind != "web_search_call" or self.shown:
            return
        elif isinstance(event, ToolProgressed):
            if isinstance(event.progress, BrowserAction):
                yield from self._searching({"action": action_object(event.progress)})
        elif isinstance(event, ToolOutcome):
            yield from self._searching({})

    def close(self, event: ItemClosed) -> Iterator[Event]:
        if is_void(self._item):
            return
        if not self.shown:
            yield self._added({})
        yield from self._written()
        if event.status != "incomplete":
            yield from self._concluded(event.status == "failed")
        item = self._builder.item(self._item)
        yield "response.output_item.done", {"output_index": self._index, "item": item}

    def _concluded(self, failed: bool) -> Iterator[Event]:
        if failed and self._kind in ("mcp_call", "mcp_list_tools"):
            yield self._state("failed")
        elif not failed and self._kind != "mcp_approval_request":
            yield self._state("completed")

    def _searching(self, fields: dict[str, Any]) -> Iterator[Event]:
        yield self._added(fields)
        yield self._state("in_progress")
        yield self._state("searching")

    def _added(self, fields: dict[str, Any]) -> Event:
        self.shown = True
        item = self._builder.built_in(self._item, "in_progress")
        if self._kind == "mcp_approval_request":
            return self._add(item)
        if self._kind == "web_search_call":
            item.pop("results", None)
            item["action"].pop("sources", None)
            return self._add({**item, **fields})
        empty: dict[str, Any] = dict.fromkeys(("outputs", "output", "error"))
        empty |= {"code": "", "arguments": "", "tools": []}
        if self._kind == "mcp_list_tools":
            item.pop("error", None)
        return self._add({key: empty.get(key, value) for key, value in item.items()})

    def _add(self, item: dict[str, Any]) -> Event:
        return "response.output_item.added", {"output_index": self._index, "item": item}

    def _written(self) -> Iterator[Event]:
        """Yields the events that end the call's text, once."""
        if not self._text_done and self._kind in TEXT_EVENTS:
            self._text_done = True
            stem, key = TEXT_EVENTS[self._kind]
            yield f"{stem}.done", {**self._position, key: self._item.text_so_far}

    def _state(self, name: str) -> Event:
        return f"response.{self._kind}.{name}", self._position
