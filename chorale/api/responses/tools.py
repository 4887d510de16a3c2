"""The ``tools`` and ``tool_choice`` of a request, converted for the model and for responses.

Functions are accepted in the flat form and in Chat's nested form, and so are the other tools that a client
runs (``chorale.requests.client_tools``). Every other type is a built-in tool or is refused.

The input may also declare tools (``tool_search_output``, ``additional_tools``): the model sees them at that
position and may call them afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chorale.errors import invalid
from chorale.harmony.messages import ToolDescription
from chorale.requests.built_in_tools import without_secrets
from chorale.requests.client_tools import (
    custom_tool,
    fixed_tool,
    in_namespace,
    prompt_name,
    tool_search,
)
from chorale.requests.prompt import check_distinct, read_function, tool_name
from chorale.requests.readers import optional_mapping, optional_string, read_string
from chorale.requests.tool_choice import read_tool_choice
from chorale.turns.functions import Function
from chorale.turns.rules import ToolChoice

_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_CLIENT_TYPES = frozenset(
    {"function", "custom", "namespace", "local_shell", "apply_patch", "tool_search"}
)  # ``shell`` also belongs here if its environment is local


@dataclass(frozen=True, slots=True)
class ToolSet:
    functions: tuple[Function, ...]  # rendered at the head of the prompt
    echo: list[dict[str, Any]]
    choice: ToolChoice
    echo_choice: str | dict[str, Any]
    declared: tuple[Function, ...] = ()  # from tool lists within the input
    about: str | None = None  # descriptions of the namespaces

    @property
    def descriptions(self) -> list[ToolDescription]:
        return [function.tool for function in self.functions]

    @property
    def callable(self) -> tuple[Function, ...]:
        return self.functions + self.declared


def read_tools(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    declared: Sequence[Sequence[Mapping[str, Any]]] = (),
    built_in: Sequence[str] = (),
) -> ToolSet:
    """Reads all tools. ``declared``: tool lists within the input. ``built_in``: names of the built-in tools.

    Raises ``RequestError`` with the index of the tool, or for an invalid ``tool_choice``.
    """
    functions, about = read_functions(tools, "tools")
    check_distinct([function.tool for function in functions], "tools")
    later: dict[str, Function] = {}
    for listed in declared:
        later |= {function.name: function for function in read_functions(listed, "input.tools")[0]}
    for function in functions:
        later.pop(function.name, None)  # clients may repeat declarations
    everything = [*functions, *later.values()]
    choice = read_tool_choice(tool_choice, everything, "tool_choice", built_in)
    echo_choice = tool_choice if isinstance(tool_choice, str) else dict(tool_choice)
    echo = [shown_tool(tool, f"tools[{position}]") for position, tool in enumerate(tools)]
    return ToolSet(tuple(functions), echo, choice, echo_choice, tuple(later.values()), about)


def read_functions(tools: Sequence[Mapping[str, Any]], path: str) -> tuple[list[Function], str | None]:
    """Returns the client's functions and the descriptions of its namespaces."""
    functions: list[Function] = []
    notes: list[str] = []
    for position, tool in enumerate(tools):
        tool_path = f"{path}[{position}]"
        if tool.get("type") == "namespace":
            found, note = _namespace(tool, tool_path)
            functions += found
            notes += note
        elif (function := _read(tool, tool_path)) is not None:
            functions.append(function)
    return functions, "\n".join(notes) or None


def _read(tool: Mapping[str, Any], path: str) -> Function | None:
    """Returns the function of a tool that the client runs, or None for other tools."""
    kind = read_string(tool, "type", path)
    if kind == "function":
        return read_function(_flatten(tool, path), path)
    if kind == "custom":
        return custom_tool(_nested(tool, "custom", path), path)
    if kind in ("local_shell", "apply_patch") or (kind == "shell" and _is_local(tool)):
        return fixed_tool(kind, path)
    if kind == "tool_search":
        # Tool search has no effect: all tools are always in the prompt.
        return tool_search(tool, path) if tool.get("execution") == "client" else None
    return None


def is_built_in(tool: Mapping[str, Any]) -> bool:
    """Returns whether a tool does not run on the client."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind not in _CLIENT_TYPES and not (kind == "shell" and _is_local(tool))


def _is_local(tool: Mapping[str, Any]) -> bool:
    """Returns whether a shell tool runs its commands on the client, not in OpenAI's container."""
    environment = tool.get("environment")
    return environment is None or (isinstance(environment, Mapping) and environment.get("type") == "local")


def _namespace(tool: Mapping[str, Any], path: str) -> tuple[list[Function], list[str]]:
    name = tool_name(tool.get("name"), f"{path}.name")
    description = optional_string(tool, "description", path)
    found: list[Function] = []
    for position, member in enumerate(list_tools(tool, path)):
        tool_path = f"{path}.tools[{position}]"
        if member.get("type") not in ("function", "custom"):
            raise invalid(f"{tool_path}.type", "must be 'function' or 'custom'")
        function = _read(member, tool_path)
        assert function is not None
        found.append(in_namespace(function, name))
    return found, [f"{prompt_name('*', name)}: {description}"] if description else []


def list_tools(given: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    """Returns the field ``tools``. Checks only that it is a list of objects."""
    tools = given.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise invalid(f"{path}.tools", "must be a list of tools")
    return tools


def shown_tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns a declared tool as shown in responses. Raises ``RequestError`` if it is invalid."""
    if tool.get("type") == "function":
        return _flatten(tool, path)
    if tool.get("type") == "code_interpreter" and tool.get("container") is None:
        return {**tool, "container": {"type": "auto"}}  # OpenAI's type requires a container
    return without_secrets(tool) if tool.get("type") == "mcp" else dict(tool)


def _nested(tool: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    """Converts a tool from Chat's nested form to the flat form of Responses."""
    return {**tool, **optional_mapping(tool, key, path)}


def _flatten(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns a function in the flat form, with all keys."""
    source = _nested(tool, "function", path)
    return {"type": "function", **{key: source.get(key) for key in _FUNCTION_KEYS}}
