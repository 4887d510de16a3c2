"""Compares the value of one argument with the accepted ones.

``accepted`` is the list of an answer: "" in it means that the argument may be left out. The members of an
accepted object are such lists too. Strings are compared without case, spaces and some punctuation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chorale.evaluation.tasks.bfcl.fault import Fault

# The leaderboard's (bfcl_eval 2026.3.23, Apache-2.0): scores depend on it.
_IGNORED = re.compile(r"[ \,\.\/\-\_\*\^]")


@dataclass(frozen=True, slots=True)
class Kind:
    """The expected type of an argument: its name in the description, and the Python types it stands for."""

    name: str
    outer: type
    inner: type | None = None


def plain(value: Any) -> Any:
    """Returns a string in the form in which strings are compared, other values as they are."""
    return _IGNORED.sub("", value).lower().replace("'", '"') if type(value) is str else value


def check_value(name: str, value: Any, accepted: Sequence[Any], kind: Kind) -> Fault | None:
    fault, is_variable = _check_type(name, value, accepted, kind)
    if fault is not None:
        return fault
    wrong = f"Invalid value for parameter {name!r}: {value!r}. Expected one of {list(accepted)}."
    if is_variable:
        return None if value in accepted else Fault("value_error:others", wrong)
    if kind.outer is dict:
        return _check_object(value, accepted)
    if kind.outer is list and kind.inner is dict:
        return _check_objects(value, accepted)
    if kind.outer is str:
        right = [plain(one) for one in accepted if type(one) is str]
        return None if plain(value) in right else Fault("value_error:string", wrong)
    if kind.outer is list:
        lists = [[plain(element) for element in one] for one in accepted]
        return (
            None if [plain(element) for element in value] in lists else Fault("value_error:list/tuple", wrong)
        )
    return None if value in accepted else Fault("value_error:others", wrong)


def _check_type(name: str, value: Any, accepted: Sequence[Any], kind: Kind) -> tuple[Fault | None, bool]:
    """Returns a fault, and whether the answer is the name of a variable instead of a value of the type."""
    sample = next((type(one) for one in accepted if one != ""), None)
    if type(value) is kind.outer:
        if kind.inner is None or _elements_fit(name, value, accepted, kind.inner):
            return None, sample is not None and sample is not kind.outer
        if type(value) is sample:
            message = (
                f"Wrong type of an element of parameter {name!r}, expected {kind.inner.__name__}: {value!r}."
            )
            return Fault("type_error:nested", message), False
    elif sample is not None and type(value) is sample:
        return None, True
    message = (
        f"Wrong type of parameter {name!r}: expected {kind.name}, got {type(value).__name__}: {value!r}."
    )
    return Fault("type_error:simple", message), False


def _elements_fit(name: str, value: Any, accepted: Sequence[Any], inner: type) -> bool:
    """Returns whether all elements have the inner type, or that of one accepted list's elements."""
    element = Kind(inner.__name__, inner)
    return any(
        type(one) is not list or all(_check_type(name, item, one, element)[0] is None for item in value)
        for one in accepted
    )


def _check_objects(value: list[Any], accepted: Sequence[Any]) -> Fault | None:
    fault: Fault | None = Fault("list_dict_checker:unclear", "No list of objects is accepted.")
    for one in accepted:
        if len(value) != len(one):
            fault = Fault("value_error:list_dict_count", "Wrong number of objects in the list.")
            continue
        faults = (_check_object(item, [right]) for item, right in zip(value, one, strict=True))
        fault = next((found for found in faults if found is not None), None)
        if fault is None:
            return None
    return fault


def _check_object(value: dict[str, Any], accepted: Sequence[Any]) -> Fault | None:
    """Checks the members of an object; objects in it are compared as they are."""
    fault: Fault | None = Fault("dict_checker:unclear", "No object is accepted.")
    for one in accepted:
        if one == "":
            continue
        fault = _check_missing(value, one) or _check_members(value, one)
        if fault is None:
            return None
    return fault


def _check_missing(value: dict[str, Any], accepted: dict[str, list[Any]]) -> Fault | None:
    for key, members in accepted.items():
        if key not in value and "" not in members:
            return Fault("value_error:dict_key", f"Missing member {key!r}.")
    return None


def _check_members(value: dict[str, Any], accepted: dict[str, list[Any]]) -> Fault | None:
    for key, member in value.items():
        if key not in accepted:
            return Fault("value_error:dict_key", f"Unexpected member {key!r}.")
        right = [plain(one) for one in accepted[key]]
        if plain(member) not in right:
            return Fault(
                "value_error:dict_value",
                f"Invalid value of member {key!r}: {member!r}. Expected one of {right}.",
            )
    return None
