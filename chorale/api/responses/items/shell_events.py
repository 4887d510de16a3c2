"""CommandReader: incremental extraction of the commands from the arguments of a shell call.

The arguments are ``{"commands": ["...", ...], ...}``. If they begin differently, the commands are
reported only when the item is finished.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from chorale.harmony.json_text import loads

_OPENING = re.compile(
    r'\s*\{\s*(?:"(?:timeout_ms|max_output_length)"\s*:\s*(?:-?[0-9]+|null)\s*,\s*)*"commands"\s*:\s*\['
)
_BETWEEN = re.compile(r"[\s,]*")
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_NO_LOW = rf"(?=[^\\]|\\[^u]|(?!{_LOW})\\u[0-9a-fA-F]{{4}})"
# Complete characters and escapes: a surrogate pair, or a surrogate that is known to be alone.
_TEXT = re.compile(
    rf'(?:[^"\\]|\\[^u]|{_HIGH}{_LOW}|{_HIGH}{_NO_LOW}|(?!{_HIGH})\\u[0-9a-fA-F]{{4}})+', re.DOTALL
)
_MAX_OPENING = 256  # characters

CommandEvent = tuple[str, int, str]  # ("added", "delta" or "done"; index of the command; text)


class CommandReader:
    """Converts pieces of the arguments to events. ``finish`` takes the commands of the finished item."""

    def __init__(self) -> None:
        self._unread = ""
        self._began = False
        self._finished = False  # the list has ended, or the arguments have another form
        self._is_open = False
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
            if self._is_open:
                found = _TEXT.match(self._unread)
                if found is not None:
                    yield self._lengthen(found.group())
                    self._unread = self._unread[found.end() :]
                if not self._unread.startswith('"'):
                    return  # the escape is incomplete
                self._is_open, self._unread = False, self._unread[1:]
                yield "done", len(self._texts) - 1, self._texts[-1]
                continue
            between = _BETWEEN.match(self._unread)
            assert between is not None
            self._unread = self._unread[between.end() :]
            if self._unread.startswith('"'):
                self._is_open, self._unread = True, self._unread[1:]
                self._texts.append("")
                yield "added", len(self._texts) - 1, ""
            elif self._unread:
                self._finished = True

    def _lengthen(self, raw: str) -> CommandEvent:
        text = str(loads(f'"{raw}"', strict=False))
        self._texts[-1] += text
        return "delta", len(self._texts) - 1, text

    def finish(self, commands: Sequence[str]) -> Iterator[CommandEvent]:
        """Yields the remaining events, or none if the streamed text differs from the final commands."""
        streamed = self._texts
        if len(streamed) > len(commands) or not all(map(str.startswith, commands, streamed)):
            return
        num_done = len(streamed) - self._is_open
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
