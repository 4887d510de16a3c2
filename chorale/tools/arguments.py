"""Lenient parsing of a tool call's JSON arguments: models write numbers as strings and omit fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.harmony.json_text import loads
from chorale.tools.errors import ToolError

_MAX_LEN = 256 * 1024


class Arguments:
    """The arguments of a call. Raises ``ToolError`` with a message that helps the model to correct them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @classmethod
    def read(cls, content: str) -> Arguments:
        return cls(parse_object(content))

    def raw(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def text(self, name: str, max_len: int) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ToolError(f"`{name}` must be a non-empty string")
        if len(value) > max_len:
            raise ToolError(f"`{name}` is longer than {max_len} characters")
        return value

    def flag(self, name: str) -> bool:
        return self._values.get(name) in (True, "true", "True", 1)

    def number(self, name: str, default: int) -> int:
        """Returns an integer; accepts "3" and 3.0 as 3."""
        value = self._values.get(name)
        if value is None or value == "":
            return default
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise ToolError(f"`{name}` must be an integer, not a string") from None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e9:
            raise ToolError(f"`{name}` must be an integer")
        return int(value)


def parse_object(content: str) -> dict[str, Any]:
    """Parses a JSON object; empty text is an empty object. Raises ``ToolError``."""
    if not content.strip():
        return {}
    if len(content) > _MAX_LEN:
        raise ToolError(f"the arguments are longer than {_MAX_LEN} characters")
    try:
        value = loads(content)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ToolError("the arguments must be a JSON object")
    return value
