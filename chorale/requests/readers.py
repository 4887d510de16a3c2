"""Readers of the fields of JSON objects in requests. Each raises ``RequestError`` with the field's path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from chorale.errors import invalid

Object = Mapping[str, Any]


def read_string(given: Object, key: str, path: str, *, empty: bool = False) -> str:
    """Returns a string. ``empty``: it may be empty."""
    value = given.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise invalid(f"{path}.{key}", "must be a string")
    return value


def optional_string(given: Object, key: str, path: str) -> str | None:
    return None if given.get(key) is None else read_string(given, key, path, empty=True)


def optional_flag(given: Object, key: str, path: str) -> bool | None:
    value = given.get(key)
    if not isinstance(value, bool | None):
        raise invalid(f"{path}.{key}", "must be true or false")
    return value


def read_mapping(given: Object, key: str, path: str) -> Object:
    value = given.get(key)
    if not isinstance(value, Mapping):
        raise invalid(f"{path}.{key}", "must be an object")
    return value


def optional_mapping(given: Object, key: str, path: str) -> Object:
    """Returns an object, which is empty if it is absent."""
    return {} if given.get(key) is None else read_mapping(given, key, path)


def read_arguments(call: Object, path: str) -> str:
    """Returns the arguments of a call as JSON. Some clients parse the string and send the object."""
    arguments = call.get("arguments")
    if isinstance(arguments, Mapping):
        return msgspec.json.encode(arguments).decode()
    return optional_string(call, "arguments", path) or "{}"
