"""JSON strings that are read while they are written: JsonString, and InputReader for ``{"input": "..."}``.

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


class JsonString:
    """Decodes a JSON string, from the text behind its opening quote. ``closed``: its end was read."""

    __slots__ = ("_held", "_high", "closed")

    def __init__(self) -> None:
        self._held = ""  # the beginning of an escape
        self._high: int | None = None  # the first half of a surrogate pair
        self.closed = False

    def feed(self, text: str) -> tuple[str, str]:
        """Returns the decoded text, and the text behind the closing quote."""
        text, self._held = self._held + text, ""
        out: list[str] = []
        position = 0
        while position < len(text) and not self.closed:
            if plain := _PLAIN.match(text, position):
                out += [self.finish(), plain.group()]
                position = plain.end()
            elif text[position] == '"':
                out.append(self.finish())
                position += 1
                self.closed = True
            else:
                size = 6 if text[position + 1 : position + 2] == "u" else 2
                escape = text[position : position + size]
                position += len(escape)
                if len(escape) < size:
                    self._held = escape
                else:
                    out.append(self._unescape(escape))
        return "".join(out), text[position:]

    def finish(self) -> str:
        """Returns the replacement of half of a surrogate pair, if the other half does not follow."""
        if self._high is None:
            return ""
        self._high = None
        return "\ufffd"

    def _unescape(self, escape: str) -> str:
        if len(escape) == 2:
            return self.finish() + _ESCAPES.get(escape[1], escape)
        try:
            code = int(escape[2:], 16)
        except ValueError:
            return self.finish() + escape
        if self._high is not None and 0xDC00 <= code < 0xE000:
            high, self._high = self._high, None
            return chr(0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00))
        before = self.finish()
        if 0xD800 <= code < 0xDC00:
            self._high = code
            return before
        return before + ("\ufffd" if 0xDC00 <= code < 0xE000 else chr(code))


class InputReader:
    """Takes the model's text and returns the input within it. One per call."""

    __slots__ = ("_is_json", "_opening", "_string")

    def __init__(self) -> None:
        self._opening = ""  # the text so far, while it may be an opening
        self._is_json: bool | None = None  # None: undecided
        self._string = JsonString()

    def feed(self, text: str) -> str:
        if self._is_json is None:
            text, self._opening = self._opening + text, ""
            opening = _OPENING.match(text)
            if opening is not None:
                self._is_json, text = True, text[opening.end() :]
            elif len(text) <= _MAX_OPENING and _BEGIN.fullmatch(text):
                self._opening = text
                return ""
            else:
                self._is_json = False
        return self._string.feed(text)[0] if self._is_json else text

    def finish(self) -> str:
        """Returns held-back input at the end of the call."""
        if self._is_json is None:
            return "" if re.fullmatch(r"\s*(?:\{\s*\}?\s*)?", self._opening) else self._opening
        return self._string.finish()
