"""Reads ``*_types.json``: which fields a provider's answers have, and which of them may be absent or null.

``openai_types.json`` and ``anthropic_types.json`` are written by ``scripts/wire_facts.mjs`` from the types of
the TypeScript SDKs, which distinguish "may be absent" from "may be null" (Python's types do not).
``open_responses_types.json`` contains the types of the TypeSpec of openresponses.org in the same notation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
_ID = {"any": ["null", "string"]}  # null on an empty page, which the SDKs' page classes accept
_PAGE = {"object": "=list", "first_id": _ID, "last_id": _ID, "has_more": "boolean"}
# Objects of OpenAI's reference without a type in the SDK.
_UNTYPED: dict[str, dict[str, Any]] = {
    "openai": {
        "ChatCompletionList": {**_PAGE, "data": ["#ChatCompletion"]},
        "ChatCompletionMessageList": {**_PAGE, "data": ["#ChatCompletionStoreMessage"]},
        "ModelList": {"object": "=list", "data": ["#Model"]},
        "ResponseDeleted": {"id": "string", "object": "=response.deleted", "deleted": "boolean"},
        "ErrorResponse": {"error": "#ErrorObject"},
    }
}
PRIMITIVES: dict[str, tuple[type, ...]] = {"string": (str,), "number": (int, float), "boolean": (bool,)}


class Place(NamedTuple):
    """A field of one of the provider's types."""

    type: str
    field: str


@dataclass
class Report:
    """``faults``: (place, fault); ``states``: whether each field was present, null or absent."""

    faults: list[tuple[Place, str]] = field(default_factory=list)
    states: set[tuple[Place, str]] = field(default_factory=set)

    def add(self, other: Report) -> None:
        self.faults += other.faults
        self.states |= other.states


class Facts:
    """The types of one provider."""

    def __init__(self, name: str) -> None:
        read = json.loads((HERE / f"{name}_types.json").read_text())
        self.package: str = read["package"]
        self.roots: dict[str, Any] = read["roots"]
        self.types: dict[str, Any] = read["types"]
        for untyped, fields in _UNTYPED.get(name, {}).items():
            self.types[untyped] = {"fields": fields}
            self.roots[untyped] = f"#{untyped}"

    def check(self, value: Any, root: str) -> Report:
        return self._check(value, self.roots[root], Place(root, ""))

    def kinds(self, place: Place) -> str:
        """``required``, ``nullable`` (null: no value), ``optional`` (absent), ``either`` or ``unknown``."""
        fields = self.types[place.type]["fields"]
        optional = f"{place.field}?" in fields
        if not optional and place.field not in fields:
            return "unknown"
        fact = fields[f"{place.field}?" if optional else place.field]
        nullable = fact in ("null", "any") or "null" in _members(fact)
        return {
            (False, False): "required",
            (False, True): "nullable",
            (True, False): "optional",
            (True, True): "either",
        }[optional, nullable]

    def _check(self, value: Any, fact: Any, place: Place) -> Report:
        if fact == "any" or (fact == "null" and value is None):
            return Report()
        if isinstance(fact, str) and fact.startswith("#"):
            return self._object(value, fact[1:], place)
        if isinstance(fact, list):
            return self._list(value, fact[0], place)
        if isinstance(fact, dict) and "any" in fact:
            return self._union(value, fact["any"], place)
        if isinstance(fact, dict):
            return self._map(value, fact["map"], place)
        return Report() if _is_primitive(value, fact) else _fault(place, _unfit(value))

    def _list(self, value: Any, fact: Any, place: Place) -> Report:
        if not isinstance(value, list):
            return _fault(place, _unfit(value))
        found = Report()
        for entry in value:
            found.add(self._check(entry, fact, place))
        return found

    def _map(self, value: Any, fact: Any, place: Place) -> Report:
        if not isinstance(value, dict):
            return _fault(place, _unfit(value))
        return self._list(list(value.values()), fact, place)

    def _union(self, value: Any, members: list[Any], place: Place) -> Report:
        """Returns the report of the best matching member, among those with the value's literals."""
        fitting = [member for member in members if self._is_tagged(value, member)]
        reports = [self._check(value, member, place) for member in fitting]
        if not reports:
            kind = value.get("type") if isinstance(value, dict) else None
            return _fault(place, _unfit(value) if kind is None else f"no type {kind}")
        return min(reports, key=lambda report: len(report.faults))

    def _is_tagged(self, value: Any, member: Any) -> bool:
        if not (isinstance(member, str) and member.startswith("#")):
            return not isinstance(value, dict) or (isinstance(member, dict) and "map" in member)
        if not isinstance(value, dict):
            return False
        fields = self.types[member[1:]]["fields"]
        tags = {
            key: fact
            for key, fact in fields.items()
            if isinstance(fact, str) and fact.startswith("=") and not key.endswith("?")
        }
        return all(value.get(key) == fact[1:] for key, fact in tags.items())

    def _object(self, value: Any, name: str, place: Place) -> Report:
        if not isinstance(value, dict):
            return _fault(place, _unfit(value))
        found = Report()
        fields = self.types[name]["fields"]
        for key in value.keys() - {key.removesuffix("?") for key in fields}:
            found.faults.append((Place(name, key), "unknown"))
            found.states.add((Place(name, key), "null" if value[key] is None else "present"))
        for key, fact in fields.items():
            here = Place(name, key.removesuffix("?"))
            if here.field in value:
                found.add(self._check(value[here.field], fact, here))
                found.states.add((here, "null" if value[here.field] is None else "present"))
            else:
                found.states.add((here, "absent"))
                if not key.endswith("?"):
                    found.faults.append((here, "missing"))
        return found


def _members(fact: Any) -> list[Any]:
    return fact["any"] if isinstance(fact, Mapping) and "any" in fact else []


def _is_primitive(value: Any, fact: Any) -> bool:
    if isinstance(fact, str) and fact.startswith("="):
        return bool(value == fact[1:])
    if isinstance(fact, str) and fact in PRIMITIVES:
        return isinstance(value, PRIMITIVES[fact]) and (fact == "boolean" or not isinstance(value, bool))
    return fact is not None and fact != "null" and type(value) is type(fact) and bool(value == fact)


def _unfit(value: Any) -> str:
    return "null" if value is None else f"not a {type(value).__name__}"


def _fault(place: Place, what: str) -> Report:
    return Report([(place, what)])


@cache
def facts(name: str) -> Facts:
    return Facts(name)
