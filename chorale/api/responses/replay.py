"""The items of a response, rebuilt from its stored events: what is left of one whose server is gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
# Deltas that lengthen a string of the item itself.
_STRINGS = {
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
    "response.code_interpreter_call_code.delta": "code",
}
_PARTS = {
    "response.output_text.delta": "content",
    "response.reasoning_text.delta": "content",
    "response.reasoning_summary_text.delta": "summary",
}


def frame(kind: str, number: int, **fields: Any) -> bytes:
    """One event."""
    data = _encode({"type": kind, **fields, "sequence_number": number})
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def read_frames(data: bytes) -> Iterator[dict[str, Any]]:
    """The events in SSE bytes of ours: whole frames of one ``event`` and one ``data`` line each."""
    for piece in data.split(b"\n\n"):
        _, found, text = piece.partition(b"\ndata: ")
        if found:
            yield json.loads(text)


class Replay:
    """Feed it every event, in order; ``items`` are as far as they came, ``open`` those without an end."""

    def __init__(self) -> None:
        self.items: dict[int, dict[str, Any]] = {}
        self.open: set[int] = set()

    def add(self, event: dict[str, Any]) -> None:
        kind, index = event["type"], event.get("output_index")
        if not isinstance(index, int):
            return
        if kind == "response.output_item.added":
            self.items[index] = event["item"]
            self.open.add(index)
        elif kind == "response.output_item.done":
            self.items[index] = event["item"]
            self.open.discard(index)
        elif index in self.open:
            self._lengthen(kind, event, self.items[index])

    def close(self, first_number: int) -> list[bytes]:
        """End what is open as incomplete: the events that say so."""
        frames: list[bytes] = []
        for index in sorted(self.open):
            item = self.items[index]
            if "status" in item and item["type"] != "apply_patch_call":  # which may only be in_progress
                item["status"] = "incomplete"
            frames.append(
                frame("response.output_item.done", first_number + len(frames), output_index=index, item=item)
            )
        self.open.clear()
        return frames

    def output(self) -> list[dict[str, Any]]:
        items = [self.items[index] for index in sorted(self.items)]
        return [item for item in items if item["type"] != "compaction" or item["encrypted_content"]]

    @staticmethod
    def _lengthen(kind: str, event: dict[str, Any], item: dict[str, Any]) -> None:
        if kind in ("response.content_part.added", "response.reasoning_summary_part.added"):
            key = "content" if kind == "response.content_part.added" else "summary"
            item.setdefault(key, []).append(event["part"])
        elif kind in _STRINGS:
            key = _STRINGS[kind]
            item[key] = (item.get(key) or "") + event["delta"]
        elif kind in _PARTS:
            part = item[_PARTS[kind]][-1]
            part["text"] += event["delta"]
            part.get("logprobs", []).extend(event.get("logprobs") or ())
