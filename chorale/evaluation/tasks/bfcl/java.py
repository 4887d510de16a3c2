"""Reads a Java literal, as the Berkeley leaderboard does: its functions take Java values as strings.

The regular expressions are the leaderboard's (bfcl_eval 2026.3.23, Apache-2.0): scores depend on them. A
literal that does not have its type's form stays a string, and then equals no expected value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

# Type in the function's description -> type of the value that the reader below returns.
TYPES: dict[str, type] = {
    "byte": int, "short": int, "integer": int, "long": int, "float": float, "double": float,
    "boolean": bool, "char": str, "Array": list, "ArrayList": list, "Set": set, "HashMap": dict,
    "Hashtable": dict, "Queue": list, "Stack": list, "String": str, "any": str,
}  # fmt: skip
NESTED = ("Array", "ArrayList")

_INTEGER = re.compile(r"^-?\d+$")
_LONG = re.compile(r"^-?\d+[lL]$")
_DOUBLE = re.compile(r"^-?\d+(\.\d+)?([eE][+-]?\d+)?$")
_FLOAT = re.compile(r"^-?\d+(\.\d+)?([eE][+-]?\d+)?[fF]$")
_AS_LIST = re.compile(r"new\s+ArrayList<\w*>\(Arrays\.asList\((.+?)\)\)")
_ADDED = re.compile(r"new\s+ArrayList<\w*>\(\)\s*\{\{\s*(.+?)\s*\}\}", re.DOTALL)
_ADD = re.compile(r"add\((.+?)\)")
_EMPTY_LIST = re.compile(r"new\s+ArrayList<\w*>\(\)")
_ARRAY = re.compile(r"new\s+\w+\[\]\s*\{(.*?)\}")
_MAP = re.compile(r"new\s+HashMap<.*?>\s*\(\)\s*\{\s*\{?\s*(.*?)\s*\}?\s*\}", re.DOTALL)
_PUT = re.compile(r"put\(\"(.*?)\",\s*(.*?)\)")
_EMPTY_MAP = re.compile(r"new\s+HashMap<.*?>\s*\(\)")


def read(text: str, kind: str, nested: str | None = None) -> Any:
    """Returns the value of a literal of type ``kind``, with elements of type ``nested``."""
    if kind in ("Array", "ArrayList"):
        return (_array if kind == "Array" else _array_list)(text, nested)
    if kind == "HashMap":
        return _hash_map(text)
    reader = _SCALARS.get(kind)
    return text if reader is None else reader(text)


def _number(pattern: re.Pattern[str], suffix: str, make: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: make(text.rstrip(suffix)) if pattern.match(text) else text


_SCALARS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("byte", "short", "integer"), _number(_INTEGER, "\n", int)),
    "long": _number(_LONG, "lL\n", int),
    "float": _number(_FLOAT, "fF\n", float),
    "double": _number(_DOUBLE, "\n", float),
    "boolean": lambda text: {"true": True, "false": False}.get(text, text),
}


def _element(text: str, nested: str | None) -> Any:
    if nested in ("char", "String"):
        return text[1:-1]  # without its quotes
    return read(text, nested) if nested else _guess(text)


def _array_list(text: str, nested: str | None) -> Any:
    if found := _AS_LIST.search(text):
        return [_element(part.strip(), nested) for part in found[1].split(",")]
    if found := _ADDED.search(text):
        return [_element(part.strip(), nested) for part in _ADD.findall(found[1])]
    return [] if _EMPTY_LIST.search(text) else text


def _array(text: str, nested: str | None) -> Any:
    found = _ARRAY.search(text)
    if found is None:
        return text
    parts = [part.strip() for part in found[1].split(",") if part.strip()]
    return [read(part, nested) if nested else _guess(part) for part in parts]


def _hash_map(text: str) -> Any:
    if found := _MAP.search(text):
        return {key: _guess(value.strip()) for key, value in _PUT.findall(found[1])}
    return {} if _EMPTY_MAP.search(text) else text


def _guess(text: str) -> Any:
    """Returns the value of a literal whose type the function's description does not give."""
    if text in ("true", "false"):
        return text == "true"
    if text.startswith('"') and text.endswith('"'):
        return text[1:-1]
    if _LONG.match(text):
        return int(text[:-1])
    if _FLOAT.match(text):
        return float(text.rstrip("fF\n"))
    for make in (int, float):
        try:
            return make(text)
        except ValueError:
            continue
    return text
