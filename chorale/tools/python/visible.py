"""Escaping of control characters in a program's output."""

from __future__ import annotations

_KEPT = {"\n", "\t"}
# C0, DEL and C1, since ESC, CSI etc. would control an operator's terminal.
_WRITTEN = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT}
# Bidirectional overrides, which can disguise text.
_WRITTEN |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


class Visible:
    """Escapes incrementally. A carriage return, alone or with a newline, ends a line."""

    def __init__(self) -> None:
        self._after_return = False

    def text(self, piece: str) -> str:
        if not piece:
            return ""
        if self._after_return and piece[0] == "\n":
            piece = piece[1:]
        self._after_return = piece.endswith("\r")
        return piece.replace("\r\n", "\n").replace("\r", "\n").translate(_WRITTEN)
