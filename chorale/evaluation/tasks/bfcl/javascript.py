"""Reads a JavaScript literal, as the Berkeley leaderboard does: its functions take these values as strings.

The regular expressions are the leaderboard's (bfcl_eval 2026.3.23, Apache-2.0): scores depend on them. A
literal that does not have its type's form stays a string, and then equals no expected value.
"""

from __future__ import annotations

import re
from typing import Any

TYPES: dict[str, type] = {
    "String": str, "integer": int, "float": float, "Bigint": int, "Boolean": bool, "dict": dict,
    "array": list, "any": str,
}  # fmt: skip
NESTED = ("array",)

_INTEGER = re.compile(r"^-?\d+$")
_FLOAT = re.compile(r"^-?\d+(\.\d+)?$")
_BIGINT = re.compile(r"^-?\d+n$")
_ARRAY_OF_ARRAYS = re.compile(
    r"\[\s*\[.*?\]\s*(,\s*\[.*?\]\s*)*\]|\bnew\s+Array\(\s*\[.*?\]\s*(,\s*\[.*?\]\s*)*\)"
)
_INNER = re.compile(r"\[(.*?)\]")
_ARRAY = re.compile(r"\[(.*?)\]|\bnew\s+Array\((.*?)\)")
_OBJECT = re.compile(r"\{(.*?)\}")
_PAIR = re.compile(r"([^:]+):\s*(.*?)(?:,\s*(?=[^,]+:)|$)")


def read(text: str, kind: str, nested: str | None = None) -> Any:
    """Returns the value of a literal of type ``kind``, with elements of type ``nested``."""
    if kind == "array":
        return _array(text.strip(), nested)
    if kind == "dict":
        return _object(text.strip())
    if kind == "String":
        return text[1:-1] if _quoted(text) else text
    if kind == "integer" and _INTEGER.match(text):
        return int(text)
    if kind == "float" and _FLOAT.match(text):
        return float(text)
    if kind == "Bigint" and _BIGINT.match(text):
        return int(text[:-1])
    if kind == "Boolean" and text in ("true", "false"):
        return text == "true"
    return text


def _quoted(text: str) -> bool:
    return any(text.startswith(quote) and text.endswith(quote) for quote in "\"'")


def _array(text: str, nested: str | None) -> Any:
    if found := _ARRAY_OF_ARRAYS.match(text):
        inner = [part.strip() for part in _INNER.findall(found[0])]
        if inner and inner[0].startswith("["):
            inner[0] = inner[0][1:]
        return [[_guess(element) for element in part.split(",")] for part in inner]
    found = _ARRAY.match(text)
    if found is None:
        return text
    body = (found[1] if found[1] is not None else found[2] or "").strip()
    parts = [part.strip() for part in body.split(",")] if body else []
    if nested is not None and nested not in TYPES:
        return text if parts else []
    return [read(part, nested) if nested else _guess(part) for part in parts]


def _object(text: str) -> Any:
    if text == "{}":
        return {}
    found = _OBJECT.match(text)
    if found is None:
        return text
    return {key.strip().strip("'\""): _member(value.strip()) for key, value in _PAIR.findall(found[1])}


def _member(text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return _array(text, None)
    if text.startswith("{") and text.endswith("}"):
        return _object(text)
    return _guess(text.strip("'\""))


def _guess(text: str) -> Any:
    """Returns the value of a literal whose type the function's description does not give."""
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    if _quoted(text):
        return text[1:-1]
    for make in (int, float):
        try:
            return make(text)
        except ValueError:
            continue
    return text
