"""Server-sent events of MCP servers, however the bytes were cut."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chorale.tools.mcp.events import MAX_LINES, Event, EventReader
from chorale.tools.mcp.wire import MAX_VALUES, McpError, decode
from tests.support.fuzz.worst_input import measure, watched

STREAM = b"\xef\xbb\xbfevent: note\r\ndata: one\r\ndata:two\n: comment\n\nevent: empty\n\ndata: last\n\n"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_reassembled_from_chunks(size: int) -> None:
    reader, found = EventReader(), []
    for start in range(0, len(STREAM), size):
        found += reader.feed(STREAM[start : start + size])
    assert found == [Event("note", "one\ntwo"), Event("message", "last")]


def test_an_event_is_bounded_even_without_a_line_end() -> None:
    for chunk in (b"data: " + b"x" * 100, b"data: x\n" * 20):
        reader = EventReader(max_bytes=64)
        with pytest.raises(McpError, match="64 bytes"):
            reader.feed(chunk)


FLOODS = {
    "line ends": b"\n",
    "comments": b":\n",
    "empty data": b"data:\n",
    "events": b"data:{}\n\n",
    "a line without an end": b"a",
    "long lines": b"a" * 1000 + b"\n",
}


@pytest.mark.parametrize("repeated", FLOODS.values(), ids=list(FLOODS))
@pytest.mark.parametrize("size", [100, 65_536])
async def test_a_flood_of_events_does_not_block_other_tasks(repeated: bytes, size: int) -> None:
    """The stream ends with an error, or the call with its time; meanwhile the event loop is free."""

    async def chunks() -> AsyncIterator[bytes]:
        data = repeated * (4_000_000 // len(repeated))
        for start in range(0, len(data), size):
            yield data[start : start + size]

    async with watched() as cost:
        cost.num_bytes = 4_000_000
        try:
            async for event in EventReader().read(chunks()):
                decode(event.data)
        except McpError:
            pass
    cost.check(max_cpu_seconds=3)


def test_the_rate_of_lines_is_bounded() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x\n\n" * (MAX_LINES // 2 - 100))
    with pytest.raises(McpError, match="lines"):
        reader.feed(b"\n" * MAX_LINES)


@pytest.mark.parametrize("part", [b"{},", b"1,", b'"a",', b"[[]],", b'"\\u00e4",'])
def test_a_message_is_bounded_before_it_is_parsed(part: bytes) -> None:
    within = b'{"id":[' + part * (MAX_VALUES // 4) + b"1]}"
    measure(lambda: decode(within), len(within)).check(max_cpu_seconds=0.5)
    above = b'{"id":[' + part * (4_000_000 // len(part)) + b"1]}"

    def refused() -> None:
        with pytest.raises(McpError, match="too many"):
            decode(above)

    measure(refused, len(above)).check(max_cpu_seconds=1)
