"""CommandReader: incremental extraction of the commands from the arguments of a shell call.

The arguments are ``{"commands": ["...", ...], ...}``. If they begin differently, no events are produced
before their end; the finished item always has the commands.
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

News = tuple[str, int, str]  # ("added", "delta" or "done", number of the command, its text)


class CommandReader:
    """Takes pieces of the arguments, then the commands of the finished item in ``finish``."""

    def __init__(self) -> None:
        self._held = ""
        self._began = False
        self._gone = False  # after the list, or the arguments have another form
        self._is_open = False
        self._texts: list[str] = []

    def feed(self, piece: str) -> Iterator[News]:
        if self._gone:
            return
        self._held += piece
        if not self._began:
            opening = _OPENING.match(self._held)
            if opening is None:
                self._gone = len(self._held) > _MAX_OPENING
                return
            self._began, self._held = True, self._held[opening.end() :]
        yield from self._read()

    def _read(self) -> Iterator[News]:
        while self._held and not self._gone:
            if self._is_open:
                found = _TEXT.match(self._held)
                if found is not None:
                    yield self._lengthen(found.group())
                    self._held = self._held[found.end() :]
                if not self._held.startswith('"'):
                    return  # in the middle of an escape
                self._is_open, self._held = False, self._held[1:]
                yield "done", len(self._texts) - 1, self._texts[-1]
                continue
            between = _BETWEEN.match(self._held)
            assert between is not None
            self._held = self._held[between.end() :]
            if self._held.startswith('"'):
                self._is_open, self._held = True, self._held[1:]
                self._texts.append("")
                yield "added", len(self._texts) - 1, ""
            elif self._held:
                self._gone = True

    def _lengthen(self, raw: str) -> News:
        text = str(loads(f'"{raw}"', strict=False))
        self._texts[-1] += text
        return "delta", len(self._texts) - 1, text

    def finish(self, commands: Sequence[str]) -> Iterator[News]:
        """Yields the remaining events; none if the streamed text does not match the final commands."""
        told = self._texts
        if len(told) > len(commands) or not all(map(str.startswith, commands, told)):
            return
        num_done = len(told) - self._is_open
        for number in range(num_done, len(commands)):
            begun = told[number] if number < len(told) else ""
            if number >= len(told):
                yield "added", number, ""
            if rest := commands[number][len(begun) :]:
                yield "delta", number, rest
            yield "done", number, commands[number]


def event_of(news: News) -> tuple[str, dict[str, Any]]:
    """Returns the event's type and its fields without ``output_index``."""
    kind, number, text = news
    key = "delta" if kind == "delta" else "command"
    return f"response.shell_call_command.{kind}", {"command_index": number, key: text}
