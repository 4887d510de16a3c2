"""InputReader: extracts the string of ``{"input": "..."}`` while it is written.

Custom tools take free text, but the model writes calls with JSON arguments: it gets a function of one string.
If it writes the bare string instead, that is the input, unchanged.
"""

from __future__ import annotations

import re

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BEGIN = re.compile(r'\s*(?:\{\s*(?:\}\s*|"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_PLAIN = re.compile(r'[^"\\]+')
_MAX_OPENING = 256  # blanks included; a longer prefix is not an opening


class InputReader:
    """Takes the model's text and returns the input within it. One per call."""

    __slots__ = ("_closed", "_held", "_high", "_is_json")

    def __init__(self) -> None:
        self._held = ""  # the opening so far, or the beginning of an escape
        self._is_json: bool | None = None  # None: undecided
        self._high: int | None = None  # the first half of a surrogate pair
        self._closed = False

    def feed(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if self._is_json is None:
            opening = _OPENING.match(text)
            if opening is not None:
                self._is_json, text = True, text[opening.end() :]
            elif len(text) <= _MAX_OPENING and _BEGIN.fullmatch(text):
                self._held = text
                return ""
            else:
                self._is_json = False
        return self._decode(text) if self._is_json else text

    def finish(self) -> str:
        """Returns held-back input at the end of the call."""
        held, self._held = self._held, ""
        if self._is_json is None:
            return "" if re.fullmatch(r"\s*(?:\{\s*\}?\s*)?", held) else held
        return self._lone_half()

    def _decode(self, text: str) -> str:
        """Decodes the rest of the JSON string; text after its end is dropped."""
        out: list[str] = []
        position = 0
        while position < len(text) and not self._closed:
            if plain := _PLAIN.match(text, position):
                out += [self._lone_half(), plain.group()]
                position = plain.end()
            elif text[position] == '"':
                out.append(self._lone_half())
                self._closed = True
            else:
                size = 6 if text[position + 1 : position + 2] == "u" else 2
                escape = text[position : position + size]
                if len(escape) < size:
                    self._held = escape
                    break
                out.append(self._unescape(escape))
                position += size
        return "".join(out)

    def _unescape(self, escape: str) -> str:
        if len(escape) == 2:
            return self._lone_half() + _ESCAPES.get(escape[1], escape)
        try:
            code = int(escape[2:], 16)
        except ValueError:
            return self._lone_half() + escape
        if self._high is not None and 0xDC00 <= code < 0xE000:
            high, self._high = self._high, None
            return chr(0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00))
        before = self._lone_half()
        if 0xD800 <= code < 0xDC00:
            self._high = code
            return before
        return before + ("\ufffd" if 0xDC00 <= code < 0xE000 else chr(code))

    def _lone_half(self) -> str:
        if self._high is None:
            return ""
        self._high = None
        return "\ufffd"
