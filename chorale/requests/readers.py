"""Readers of the fields of JSON objects in requests. Each raises ``RequestError`` with the field's path.

A reader takes an object, a key and the object's path, and returns the value of the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from chorale.errors import RequestError, invalid

Object = Mapping[str, Any]
Reader = Callable[[Object, str, str], Any]
ABSENT = msgspec.UNSET  # returned by a reader: ``read_fields`` leaves the field out


def read_fields(given: Object, readers: Mapping[str, Reader], path: str) -> dict[str, Any]:
    """Returns an object with the fields of ``readers``."""
    found = ((key, read(given, key, path)) for key, read in readers.items())
    return {key: value for key, value in found if value is not ABSENT}


def read_text(given: Object, key: str, path: str) -> str:
    """Returns a string, which may be empty."""
    value = given.get(key)
    if not isinstance(value, str):
        raise invalid(f"{path}.{key}", "must be a string")
    return value


def read_string(given: Object, key: str, path: str) -> str:
    """Returns a string that is not empty."""
    if given.get(key) == "":
        raise invalid(f"{path}.{key}", "must not be empty")
    return read_text(given, key, path)


def optional_string(given: Object, key: str, path: str) -> str | None:
    return None if given.get(key) is None else read_text(given, key, path)


def read_strings(given: Object, key: str, path: str) -> list[str]:
    value = given.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise invalid(f"{path}.{key}", "must be a list of strings")
    return value


def optional_list(given: Object, key: str, path: str) -> list[Any] | None:
    value = given.get(key)
    if not isinstance(value, list | None):
        raise invalid(f"{path}.{key}", "must be a list")
    return value


def optional_flag(given: Object, key: str, path: str) -> bool | None:
    value = given.get(key)
    if not isinstance(value, bool | None):
        raise invalid(f"{path}.{key}", "must be true or false")
    return value


def read_flag(given: Object, key: str, path: str) -> bool:
    value = optional_flag(given, key, path)
    if value is None:
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


def read_arguments(given: Object, key: str, path: str) -> str:
    """Returns the arguments of a call as JSON. Some clients parse the string and send the object."""
    arguments = given.get(key)
    if isinstance(arguments, Mapping):
        return msgspec.json.encode(arguments).decode()
    return optional_string(given, key, path) or "{}"


@contextmanager
def within(place: Callable[[str], str]) -> Iterator[None]:
    """Completes the fields that errors name: those of an object within the request. "": none was named."""
    try:
        yield
    except RequestError as error:
        error.param = place(error.param or "") or None
        raise


# --------------------------------------------------------------------------- readers made of others


def one_of(*values: str) -> Reader:
    def read(given: Object, key: str, path: str) -> str:
        value = given.get(key)
        if not isinstance(value, str) or value not in values:
            raise invalid(f"{path}.{key}", f"must be one of {', '.join(values)}")
        return value

    return read


def nested(readers: Mapping[str, Reader]) -> Reader:
    """Returns the reader of an object with these fields."""
    return lambda given, key, path: read_fields(read_mapping(given, key, path), readers, f"{path}.{key}")


def optional(read: Reader, default: Any = ABSENT) -> Reader:
    """Returns the reader of a field that may be absent or null: it then has the default, or is left out."""
    return lambda given, key, path: default if given.get(key) is None else read(given, key, path)


def as_given(given: Object, key: str, path: str) -> Any:
    """Returns the value unchecked."""
    return given.get(key)


def of_type(kind: type, default: Any = ABSENT) -> Reader:
    """Returns the reader of a field whose values of other types are replaced, not refused. True is no int."""
    return lambda given, key, path: given[key] if type(given.get(key)) is kind else default


def always(value: Any) -> Reader:
    """Returns the reader of a field that has the same value whatever was sent."""
    return lambda given, key, path: value
