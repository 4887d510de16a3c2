"""``tool_choice`` in all its forms: OpenAI's strings, a named tool, a list of allowed tools.

Supports the shapes of Chat and Responses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from chorale.errors import invalid, unsupported
from chorale.requests.built_in_tools import BUILT_IN_NAMES, own_label
from chorale.turns.functions import Function
from chorale.turns.rules import AUTO, Mode, ToolChoice

_MODES: dict[str, Mode] = {"auto": "auto", "none": "none", "required": "required"}
# Tools named by their type alone.
_SINGLE = ("local_shell", "shell", "apply_patch", "tool_search")
_NAMED = ("function", "custom")


def read_tool_choice(
    value: Any, declared: Sequence[Function], param: str, built_in: Collection[str] = ()
) -> ToolChoice:
    """``built_in``: the built-in tools of this request; an MCP server's label includes all of its tools.

    Raises ``RequestError`` for an unknown form or name, or if a call is required and no tool can be called.
    """
    choice = _read(value, declared, param, built_in)
    callable_names = [function.name for function in declared if choice.may_call(function.name)]
    usable = [name for name in built_in if choice.built_in is None or any(_covers(name, choice.built_in))]
    if choice.mode == "required" and not callable_names and not usable:
        raise invalid(param, "a call is required, but no tool that can be called is declared in tools")
    return choice


def _covers(label: str, chosen: Collection[str]) -> Iterator[bool]:
    """Returns whether the choice includes a built-in tool, or one tool of an MCP server."""
    return (name == label or name.startswith(f"{label}:") for name in chosen)


def _read(value: Any, declared: Sequence[Function], param: str, built_in: Collection[str]) -> ToolChoice:
    if value is None:
        return AUTO
    if isinstance(value, str):
        if value not in _MODES:
            raise invalid(param, f"must be one of {', '.join(_MODES)}, or an object")
        return ToolChoice(_MODES[value])
    if value.get("type") == "allowed_tools":
        return _read_allowed(value, declared, param)
    key = _built_in_key(value, param)
    if key is None:
        return ToolChoice("required", frozenset(_names(value, declared, param)), frozenset())
    if not any(key == name or key.startswith(f"{name}:") for name in built_in):
        kind = str(value.get("type"))[:64]
        raise unsupported(param, f"no tool of type {kind!r} can run for this request")
    return ToolChoice("required", frozenset(), frozenset({key}))


def _read_allowed(value: Mapping[str, Any], declared: Sequence[Function], param: str) -> ToolChoice:
    """Responses has ``mode`` and ``tools`` next to the type, Chat one level below."""
    inner = value.get("allowed_tools", value)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("tools"), list):
        raise invalid(param, "allowed_tools needs a list of tools")
    mode = inner.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise invalid(param, "the mode of allowed_tools must be 'auto' or 'required'")
    names: set[str] = set()
    keys: set[str] = set()
    for tool in inner["tools"]:
        if not isinstance(tool, Mapping):
            raise invalid(param, "allowed_tools needs a list of tools")
        # The list may contain built-in tools that this server does not have; they are never called.
        key = _built_in_key(tool, param, strict=False)
        if key is None:
            names.update(_names(tool, declared, param))
        else:
            keys.add(key)
    return ToolChoice(mode, frozenset(names), frozenset(keys), lasting=True)


def _built_in_key(value: Mapping[str, Any], param: str, strict: bool = True) -> str | None:
    """Returns the name of the built-in tool, or None for a tool of the client."""
    kind = value.get("type", "function")
    if not isinstance(kind, str):
        raise invalid(param, "the type must be a string")
    if kind in _NAMED or kind in _SINGLE or kind == "namespace":
        return None
    if kind == "mcp":
        label, tool = value.get("server_label"), value.get("name")
        if not isinstance(label, str) or not isinstance(tool, str | None):
            raise invalid(param, "an mcp tool needs a server_label")
        label = own_label(label)
        return f"mcp:{label}" if tool is None else f"mcp:{label}:{tool}"
    if strict and kind not in BUILT_IN_NAMES:
        raise unsupported(param, f"{kind[:64]!r} is not supported")
    return BUILT_IN_NAMES.get(kind, kind)


def _names(value: Mapping[str, Any], declared: Sequence[Function], param: str) -> list[str]:
    """Returns the prompt names for a client's ``{"type", "name"}``. Raises ``RequestError``."""
    kind = value.get("type", "function")
    if kind in _SINGLE:
        found = [function.name for function in declared if function.kind == kind]
        if not found:
            raise invalid(param, f"no tool of type {kind!r} is declared in tools")
        return found
    name = _name(value, param)
    if kind == "namespace":
        found = [f.name for f in declared if f.form is not None and f.form.namespace == name]
    else:
        same = [f for f in declared if f.kind == kind and f.is_named(name, value.get("namespace"))]
        # A name alone means the tool outside all namespaces, if one exists.
        found = [f.name for f in same if f.name == name] or [f.name for f in same]
    if not found:
        raise invalid(param, f"no {kind} named {name[:64]!r} is declared in tools")
    return found


def _name(value: Mapping[str, Any], param: str) -> str:
    """``{"function": {"name"}}`` (Chat) or ``{"name"}`` (Responses, ``function_call``)."""
    inner = value.get("function") or value.get("custom") or value
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise invalid(param, "needs the name of a function")
    return name
