"""Makes tools of Chat Completions from the leaderboard's function descriptions.

Names of types, hints and their wording are the leaderboard's (bfcl_eval 2026.3.23, Apache-2.0): they are part
of the prompt, so scores depend on them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

JSON_TYPES = {
    **dict.fromkeys(("integer", "byte", "short", "long", "Bigint"), "integer"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("string", "any", "Any", "char", "String"), "string"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("array", "list", "tuple", "ArrayList", "Array", "Queue", "Stack"), "array"),
    **dict.fromkeys(("dict", "object", "HashMap", "Hashtable"), "object"),
}
_LANGUAGES = {"python": "Python 3", "java": "Java 8 SDK", "javascript": "JavaScript"}
_LANGUAGE_NAMES = {"java": "Java", "javascript": "JavaScript"}
_LISTS = {"java": ("ArrayList", "Array"), "javascript": ("array",)}


def with_hints(functions: Sequence[dict[str, Any]], language: str) -> list[dict[str, Any]]:
    """Returns the descriptions with a hint; parameters of Java and JavaScript become strings."""
    hinted = copy.deepcopy(list(functions))
    for function in hinted:
        function["description"] += f" Note that the provided function is in {_LANGUAGES[language]} syntax."
        if language != "python":
            for parameter in function["parameters"]["properties"].values():
                _as_literal(parameter, language)
    return hinted


def _as_literal(parameter: dict[str, Any], language: str) -> None:
    """Describes a parameter as a string that contains a literal of the language."""
    name, kind = _LANGUAGE_NAMES[language], parameter["type"]
    if kind == "any":
        hint = f" This parameter can be of any type of {name} object in string representation."
    else:
        hint = f" This is {name} {kind} type parameter in string representation."
    if kind in _LISTS[language]:
        element = parameter.pop("items")["type"]
        hint += f" The list elements are of type {element}; they are not in string representation."
    if language == "javascript" and kind == "dict" and "properties" in parameter:
        schema = json.dumps(parameter.pop("properties"))
        hint += (
            " The dictionary entries have the following schema; they are not in string representation. "
            + schema
        )
    parameter["description"] += hint
    parameter["type"] = "string"


def to_tools(functions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tools. Dots in names become underscores: the API allows no dots.

    The description of a function's result is left out: no API passes it to the model.
    """
    tools = []
    for function in copy.deepcopy(list(functions)):
        function.pop("response", None)
        function["name"] = legal_name(function["name"])
        function["parameters"]["type"] = "object"
        _to_json_types(function["parameters"]["properties"])
        tools.append({"type": "function", "function": function})
    return tools


def legal_name(name: str) -> str:
    return name.replace(".", "_")


def _to_json_types(properties: dict[str, dict[str, Any]]) -> None:
    for schema in properties.values():
        kind = schema.get("type")
        if kind == "float":
            schema["format"] = "float"
            schema["description"] = schema.get("description", "") + " This is a float type value."
        schema["type"] = JSON_TYPES.get(kind or "string", "string")
        if schema["type"] in ("array", "object"):
            if "properties" in schema:
                _to_json_types(schema["properties"])
            elif "items" in schema:
                _items(schema["items"])


def _items(items: dict[str, Any]) -> None:
    items["type"] = JSON_TYPES.get(items.get("type", "string"), "string")
    if items["type"] == "array" and "items" in items:
        inner = items["items"]
        inner["type"] = JSON_TYPES.get(inner.get("type", "string"), "string")
    elif items["type"] == "object" and "properties" in items:
        _to_json_types(items["properties"])
