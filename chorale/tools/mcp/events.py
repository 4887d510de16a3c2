"""An incremental parser of server-sent events with a limit on the size of an event."""

from __future__ import annotations

from dataclasses import dataclass

from chorale.tools.mcp.wire import MAX_MESSAGE_BYTES, McpError


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: str


class EventReader:
    """Parses events. Accepts LF and CR LF; skips a BOM."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._name = ""
        self._data: list[str] = []
        self._num_bytes = 0
        self._first = True

    def feed(self, chunk: bytes) -> list[Event]:
        """Returns the complete events. Raises ``McpError`` for an event above the limit."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._check(len(self._rest))
        events = []
        for raw in lines:
            event = self._line(raw)
            if event is not None:
                events.append(event)
        return events

    def _check(self, more: int) -> None:
        if self._num_bytes + more > self._max_bytes:
            raise McpError(f"the server sent an event of more than {self._max_bytes} bytes")

    def _line(self, raw: bytes) -> Event | None:
        self._check(len(raw))
        line = raw.decode("utf-8", "replace").removesuffix("\r")
        if self._first:
            line, self._first = line.removeprefix("\ufeff"), False
        if line:
            self._num_bytes += len(raw)
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                self._data.append(value)
            elif field == "event":
                self._name = value
            return None
        name, data = self._name or "message", self._data
        self._name, self._data, self._num_bytes = "", [], 0
        return Event(name, "\n".join(data)) if data else None
