"""Reads JSON from a model or another server so that every string in it can be encoded again."""

from __future__ import annotations

import json
from typing import Any

from chorale.harmony.bpe import replace_surrogates

MAX_DEPTH = 200  # low enough that encoding the value again, deeper in the stack, raises no RecursionError
MAX_CALL_DEPTH = 48  # for arguments that clients get as an object: they send them back within a request


def loads(text: str | bytes, *, strict: bool = True, max_depth: int = MAX_DEPTH) -> Any:
    """Parse JSON as ``json.loads`` does, but replace lone surrogates, which UTF-8 cannot encode, by U+FFFD.

    ``strict`` False allows control characters in strings. ``max_depth`` limits the nesting of arrays and
    objects. Raises ``ValueError`` for invalid or too deeply nested JSON, and ``RecursionError`` if the
    nesting exceeds the parser's own limit.
    """
    value = json.loads(text, strict=strict)
    if _count(text, "[") + _count(text, "{") > max_depth and _is_deeper(value, max_depth):
        raise ValueError(f"it is nested more than {max_depth} deep")
    return _whole(value) if _count(text, "\\u") else value


def read_object(text: str, *, strict: bool = True, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Parse a JSON object that a model wrote. Returns an empty dict for anything else, such as a truncated
    call."""
    try:
        value = loads(text, strict=strict, max_depth=max_depth)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _count(text: str | bytes, mark: str) -> int:
    return text.count(mark) if isinstance(text, str) else text.count(mark.encode())


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether ``value`` is nested deeper than ``depth``. Works level by level, without recursion."""
    level = [value]
    for _ in range(depth + 1):
        containers = [entry for entry in level if isinstance(entry, list | dict)]
        if not containers:
            return False
        level = [v for entry in containers for v in (entry.values() if isinstance(entry, dict) else entry)]
    return True


def _whole(value: Any) -> Any:
    """Return ``value`` with lone surrogates replaced in all strings and keys."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_whole(entry) for entry in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): _whole(entry) for key, entry in value.items()}
    return value
