"""Reading JSON from a model or a foreign server so that every string in it can be written again."""

from __future__ import annotations

import json
from typing import Any

from chorale.harmony.bpe import replace_surrogates

MAX_DEPTH = 200  # far from where writing it again, deeper in the stack, would end in RecursionError
MAX_CALL_DEPTH = 48  # of arguments that are handed out as an object: they come back within a request


def loads(text: str | bytes, *, strict: bool = True, max_depth: int = MAX_DEPTH) -> Any:
    """As ``json.loads``, but half of a surrogate pair, which no UTF-8 can hold, becomes U+FFFD.

    ``strict`` False: control characters may stand in strings. ``max_depth``: of arrays and objects within
    each other. Raises ``ValueError``, and ``RecursionError`` for what is nested deeper than the parser goes.
    """
    value = json.loads(text, strict=strict)
    if _count(text, "[") + _count(text, "{") > max_depth and _is_deeper(value, max_depth):
        raise ValueError(f"it is nested more than {max_depth} deep")
    return _whole(value) if _count(text, "\\u") else value


def read_object(text: str, *, strict: bool = True, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Parse an object that a model wrote. Returns an empty one for anything else, such as a truncated
    call."""
    try:
        value = loads(text, strict=strict, max_depth=max_depth)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _count(text: str | bytes, mark: str) -> int:
    return text.count(mark) if isinstance(text, str) else text.count(mark.encode())


def _is_deeper(value: Any, depth: int) -> bool:
    """Level by level, without recursion."""
    level = [value]
    for _ in range(depth + 1):
        containers = [entry for entry in level if isinstance(entry, list | dict)]
        if not containers:
            return False
        level = [v for entry in containers for v in (entry.values() if isinstance(entry, dict) else entry)]
    return True


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_whole(entry) for entry in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): _whole(entry) for key, entry in value.items()}
    return value
