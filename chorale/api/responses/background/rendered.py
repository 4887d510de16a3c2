"""RenderedStream: ends a background stream in a store of format 3 whose server died.

Format 3 stored events as they were sent. Finished streams are served unchanged; an unfinished one is ended
here, once. Delete this module when stores of that format are no longer in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chorale.api.http.sse import encode, frame
from chorale.api.responses.background.event_log import Rendered

# Deltas that extend a string of the item.
_STRINGS = {
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
    "response.code_interpreter_call_code.delta": "code",
}


class RenderedStream:
    """Rebuilds the items of a stream from its events."""

    def __init__(self, events: Iterable[Rendered]) -> None:
        self._items: dict[int, dict[str, Any]] = {}
        self._open: set[int] = set()
        self._num_events = 0
        for event in events:
            self._num_events += 1
            if (index := event.fields.get("output_index")) is not None:
                self._add(index, event.kind, event.fields)

    def _add(self, index: int, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("response.output_item.added", "response.output_item.done"):
            self._items[index] = fields["item"]
            (self._open.add if kind.endswith("added") else self._open.discard)(index)
        elif kind == "response.content_part.added":
            self._items[index].setdefault("content", []).append(fields["part"])
        elif kind in _STRINGS:
            item, key = self._items[index], _STRINGS[kind]
            item[key] = (item.get(key) or "") + fields["delta"]
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            part = self._items[index]["content"][-1]
            part["text"] += fields["delta"]
            part.get("logprobs", []).extend(fields.get("logprobs") or ())

    def end(self, body: dict[str, Any]) -> tuple[bytes, int]:
        """Ends open items as incomplete and the stream with ``body``. Returns these events, counted."""
        frames: list[bytes] = []

        def add(kind: str, **fields: Any) -> None:
            number = self._num_events + len(frames)
            data = encode({"type": kind, **fields, "sequence_number": number})
            frames.append(frame(kind.encode(), data))

        for index in sorted(self._open):
            item = self._items[index]
            if "status" in item and item["type"] != "apply_patch_call":  # always in_progress
                item["status"] = "incomplete"
            add("response.output_item.done", output_index=index, item=item)
        kind = "response.failed" if body["status"] == "failed" else "response.incomplete"
        add(kind, response={**body, "output": self.output()})
        return b"".join(frames), len(frames)

    def output(self) -> list[dict[str, Any]]:
        items = [self._items[index] for index in sorted(self._items)]
        return [item for item in items if item["type"] != "compaction" or item["encrypted_content"]]
