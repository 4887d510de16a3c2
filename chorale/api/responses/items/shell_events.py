"""CommandReader: incremental extraction of the commands from the arguments of a shell call.

The arguments are ``{"commands": ["...", ...], ...}``. If they begin differently, the commands are
reported only when the item is finished.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from chorale.turns.choice.partial_json import JsonString

_OPENING = re.compile(
    r'\s*\{\s*(?:"(?:timeout_ms|max_output_length)"\s*:\s*(?:-?[0-9]+|null)\s*,\s*)*"commands"\s*:\s*\['
)
_BETWEEN = re.compile(r"[\s,]*")
_MAX_OPENING = 256  # characters

CommandEvent = tuple[str, int, str]  # ("added", "delta" or "done"; index of the command; text)


class CommandReader:
    """Converts pieces of the arguments to events. ``finish`` takes the commands of the finished item."""

    def __init__(self) -> None:
        self._unread = ""
        self._began = False
        self._finished = False  # the list has ended, or the arguments have another form
        self._string: JsonString | None = None  # the open command
        self._texts: list[str] = []

    def feed(self, piece: str) -> Iterator[CommandEvent]:
        if self._finished:
            return
        self._unread += piece
        if not self._began:
            opening = _OPENING.match(self._unread)
            if opening is None:
                self._finished = len(self._unread) > _MAX_OPENING
                return
            self._began, self._unread = True, self._unread[opening.end() :]
        yield from self._read()

    def _read(self) -> Iterator[CommandEvent]:
        while self._unread and not self._finished:
            if self._string is not None:
                text, self._unread = self._string.feed(self._unread)
                self._texts[-1] += text
                if text:
                    yield "delta", len(self._texts) - 1, text
                if self._string.closed:
                    self._string = None
                    yield "done", len(self._texts) - 1, self._texts[-1]
                continue
            between = _BETWEEN.match(self._unread)
            assert between is not None
            self._unread = self._unread[between.end() :]
            if self._unread.startswith('"'):
                self._string, self._unread = JsonString(), self._unread[1:]
                self._texts.append("")
                yield "added", len(self._texts) - 1, ""
            elif self._unread:
                self._finished = True

    def finish(self, commands: Sequence[str]) -> Iterator[CommandEvent]:
        """Yields the remaining events, or none if the streamed text differs from the final commands."""
        streamed = self._texts
        if len(streamed) > len(commands) or not all(map(str.startswith, commands, streamed)):
            return
        num_done = len(streamed) - (self._string is not None)
        for number in range(num_done, len(commands)):
            prefix = streamed[number] if number < len(streamed) else ""
            if number >= len(streamed):
                yield "added", number, ""
            if rest := commands[number][len(prefix) :]:
                yield "delta", number, rest
            yield "done", number, commands[number]


def stream_event(event: CommandEvent) -> tuple[str, dict[str, Any]]:
    """Returns the type and the fields of a stream event, without ``output_index``."""
    kind, number, text = event
    key = "delta" if kind == "delta" else "command"
    return f"response.shell_call_command.{kind}", {"command_index": number, key: text}
