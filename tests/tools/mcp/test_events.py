"""Server-sent events of MCP servers, however the bytes were cut."""

from __future__ import annotations

import pytest

from chorale.tools.mcp.events import Event, EventReader
from chorale.tools.mcp.wire import McpError

STREAM = b"\xef\xbb\xbfevent: note\r\ndata: one\r\ndata:two\n: comment\n\nevent: empty\n\ndata: last\n\n"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_whole(size: int) -> None:
    reader, found = EventReader(), []
    for start in range(0, len(STREAM), size):
        found += reader.feed(STREAM[start : start + size])
    assert found == [Event("note", "one\ntwo"), Event("message", "last")]


def test_an_event_is_bounded_even_without_a_line_end() -> None:
    for chunk in (b"data: " + b"x" * 100, b"data: x\n" * 20):
        reader = EventReader(max_bytes=64)
        with pytest.raises(McpError, match="64 bytes"):
            reader.feed(chunk)
