"""RenderedStream: a background stream of a store of format 3, which was in progress when its server died.

Such a store held the events as they were sent. Finished streams are served as they are; one that had not
ended when the server was upgraded is ended here, once. This module can go when no store of that format is
left in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chorale.api.http.sse import encode, frame
from chorale.api.responses.background.event_log import Rendered

# Deltas that lengthen a string of the item itself.
_STRINGS = {
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
    "response.code_interpreter_call_code.delta": "code",
}


class RenderedStream:
    """The items of a stream, rebuilt from its events."""

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
        """End open items as incomplete, and the stream with ``body``: these events, and their number."""
        frames: list[bytes] = []

        def add(kind: str, **fields: Any) -> None:
            number = self._num_events + len(frames)
            data = encode({"type": kind, **fields, "sequence_number": number})
            frames.append(frame(kind.encode(), data))

        for index in sorted(self._open):
            item = self._items[index]
            if "status" in item and item["type"] != "apply_patch_call":  # which may only be in_progress
                item["status"] = "incomplete"
            add("response.output_item.done", output_index=index, item=item)
        kind = "response.failed" if body["status"] == "failed" else "response.incomplete"
        add(kind, response={**body, "output": self.output()})
        return b"".join(frames), len(frames)

    def output(self) -> list[dict[str, Any]]:
        items = [self._items[index] for index in sorted(self._items)]
        return [item for item in items if item["type"] != "compaction" or item["encrypted_content"]]
