"""Readers of server-sent events."""

from __future__ import annotations

import json
from typing import Any

import httpx2


def frames(response: httpx2.Response) -> list[Any]:
    """Returns the JSON of each event, without comments and ``[DONE]``."""
    found = []
    for frame in response.text.split("\n\n"):
        data = "\n".join(line[6:] for line in frame.split("\n") if line.startswith("data: "))
        if data and data != "[DONE]":
            found.append(json.loads(data))
    return found


def parse_sse(content: bytes, first: int = 0) -> list[dict[str, Any]]:
    """Returns the events of Responses; asserts their ``event:`` lines and sequence numbers."""
    if first and not content:
        return []
    assert content.endswith(b"\n\n")
    content = content.removesuffix(b"data: [DONE]\n\n")  # sent in the open-responses dialect
    assert b"[DONE]" not in content
    events = []
    for frame in content[:-2].split(b"\n\n"):
        name, data = frame.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        assert event["sequence_number"] == first + len(events)
        events.append(event)
    return events
