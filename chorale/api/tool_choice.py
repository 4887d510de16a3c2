"""Functions as they are declared, and ``tool_choice`` in all its forms.

OpenAI's strings, a named function, a list of allowed tools; in the shape of Chat or of Responses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from chorale.api.prompt import function_tool
from chorale.errors import RequestError
from chorale.harmony.messages import ToolDescription

Mode = Literal["auto", "none", "required"]
_MODES: dict[str, Mode] = {"auto": "auto", "none": "none", "required": "required"}


@dataclass(frozen=True, slots=True)
class Function:
    """One declared function. ``strict``: its arguments must satisfy its schema; ``param``: where that is."""

    tool: ToolDescription
    strict: bool = False
    param: str = "tools"

    @classmethod
    def read(cls, value: Mapping[str, Any], param: str) -> Function:
        """Raises ``RequestError``."""
        return cls(function_tool(value, param), value.get("strict") is True, f"{param}.parameters")

    @property
    def name(self) -> str:
        return self.tool.name


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``names``: the only functions that may be called; None: all that are declared."""

    mode: Mode = "auto"
    names: frozenset[str] | None = None

    def may_call(self, name: str) -> bool:
        return self.mode != "none" and (self.names is None or name in self.names)


AUTO = ToolChoice()


def read_tool_choice(value: Any, declared: Collection[str], param: str) -> ToolChoice:
    """Raises ``RequestError`` for a form or a name that does not exist, or a call that nothing could take."""
    choice = _read(value, param)
    for name in sorted(choice.names or ()):
        if name not in declared:
            raise _invalid(f"no function named {name[:64]!r} is declared in tools", param)
    if choice.mode == "required" and not any(choice.may_call(name) for name in declared):
        raise _invalid("a call is required, but no function that can be called is declared in tools", param)
    return choice


def _read(value: Any, param: str) -> ToolChoice:
    if value is None:
        return AUTO
    if isinstance(value, str):
        if value not in _MODES:
            raise _invalid(f"must be one of {', '.join(_MODES)}, or an object", param)
        return ToolChoice(_MODES[value])
    kind = value.get("type", "function")
    if kind == "function":
        return ToolChoice("required", frozenset({_name(value, param)}))
    if kind == "allowed_tools":
        return _read_allowed(value, param)
    raise RequestError(
        f"{param}: {str(kind)[:64]!r} is not supported; functions are", param=param, code="unsupported_value"
    )


def _read_allowed(value: Mapping[str, Any], param: str) -> ToolChoice:
    """Responses writes ``mode`` and ``tools`` beside the type, Chat one level down."""
    inner = value.get("allowed_tools", value)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("tools"), list):
        raise _invalid("allowed_tools needs a list of tools", param)
    mode = inner.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise _invalid("the mode of allowed_tools must be 'auto' or 'required'", param)
    # Hosted tools may be listed too; they do not run here, so they are never called.
    tools = [
        tool for tool in inner["tools"] if not isinstance(tool, Mapping) or tool.get("type") == "function"
    ]
    return ToolChoice(mode, frozenset(_name(tool, param) for tool in tools))


def _name(value: Any, param: str) -> str:
    """``{"function": {"name"}}`` (Chat) or ``{"name"}`` (Responses, ``function_call``)."""
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise _invalid("needs the name of a function", param)
    return name


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param)
