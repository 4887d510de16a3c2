"""Built-in tools in Chat Completions: ``annotations`` and the extension ``builtin_tool_calls``.

OpenAI's API has no fields for these calls, so ``message.builtin_tool_calls`` lists them in order. A stream
sends each like a tool call, by index: its head, pieces of ``arguments``, pieces of ``output``, and finally
its status and other results.
"""

from __future__ import annotations

from typing import Any

from chorale.api.responses.items.built_in import action_object
from chorale.tools.contract import (
    BrowserAction,
    CodeOutput,
    McpDetail,
    Progress,
    PythonDetail,
    SearchAction,
    ToolResult,
    UrlCitation,
)
from chorale.turns.events import FoldedItem, ItemKind, ItemOpened

SHOWN: frozenset[ItemKind] = frozenset({"web_search_call", "code_interpreter_call", "mcp_call"})


def annotation(citation: UrlCitation, offset: int) -> dict[str, Any]:
    """Returns an annotation. ``offset``: start of the cited text part within the content."""
    return {
        "type": "url_citation",
        "url_citation": {
            "start_index": citation.start_index + offset,
            "end_index": citation.end_index + offset,
            "title": citation.title,
            "url": citation.url,
        },
    }


def head(opened: ItemOpened) -> dict[str, Any]:
    """Returns the fields that are known when the header of a call is complete."""
    entry = {"id": opened.item_id, "type": opened.kind, "name": opened.name, "arguments": ""}
    if opened.namespace is not None:
        entry["server_label"] = opened.namespace
    if opened.container_id is not None:
        entry["container_id"] = opened.container_id
    return entry


def conclusion(status: str, result: ToolResult | None, num_shown: int) -> dict[str, Any]:
    """Returns the final fields of a call. ``num_shown``: characters of its output that are already sent."""
    entry: dict[str, Any] = {"status": status}
    detail = result.detail if result is not None else None
    if isinstance(detail, PythonDetail):
        entry["output"] = detail.logs[num_shown:]
    elif isinstance(detail, McpDetail):
        entry["output" if detail.error is None else "error"] = detail.output or detail.error or ""
    elif isinstance(detail, BrowserAction):
        entry["action"] = action(detail)
    return entry


def action(what: BrowserAction) -> dict[str, Any]:
    """Returns the action of a browser call in the form of Responses, with search results."""
    if not isinstance(what, SearchAction):
        return action_object(what)
    return action_object(what) | {"sources": [{"type": "url", "url": source.url} for source in what.sources]}


def whole(item: FoldedItem) -> dict[str, Any]:
    """Returns a finished call, equal to the merged pieces of a stream."""
    result = item.outcome if isinstance(item.outcome, ToolResult) else None
    return head(item.opened) | {"arguments": item.text} | conclusion(item.status or "incomplete", result, 0)


class CallWriter:
    """Writes the pieces of a choice's built-in calls, in order."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_shown = 0  # characters of the open call's output that are sent
        self._result: ToolResult | None = None

    def opened(self, opened: ItemOpened) -> dict[str, Any]:
        self._num_calls += 1
        self._num_shown, self._result = 0, None
        return self._piece(**head(opened))

    def written(self, text: str) -> dict[str, Any]:
        return self._piece(arguments=text)

    def progressed(self, progress: Progress) -> dict[str, Any] | None:
        if not isinstance(progress, CodeOutput) or not progress.text:
            return None
        self._num_shown += len(progress.text)
        return self._piece(output=progress.text)

    def came(self, result: ToolResult) -> None:
        self._result = result

    def closed(self, status: str) -> dict[str, Any]:
        return self._piece(**conclusion(status, self._result, self._num_shown))

    def _piece(self, **fields: Any) -> dict[str, Any]:
        return {"builtin_tool_calls": [{"index": self._num_calls - 1, **fields}]}
