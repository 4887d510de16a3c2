"""Tools and tool_choice in Anthropic's form.

The client runs all tools. Tools that Anthropic defines by type without a schema (bash, text editor, memory)
get the documented arguments; tools that run on Anthropic's servers are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from chorale.api.messages.request import AnthropicToolChoice
from chorale.config.engine import StrictLevel
from chorale.errors import invalid, unsupported
from chorale.grammar import constraint as make
from chorale.requests.prompt import check_distinct, read_function
from chorale.requests.tool_choice import read_tool_choice
from chorale.turns.functions import Function
from chorale.turns.rules import ToolChoice

_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}


def _schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _one_of(commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": commands.split()}


_RANGE = {"type": "array", "items": _NUMBER}
_EDIT = {
    "path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _NUMBER,
    "insert_text": _TEXT,
}  # fmt: skip
# Type without its date -> (description, schema).
_DEFINED: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a bash session that persists between calls.",
        _schema([], command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor": (
        "Views and edits text files.",
        _schema(
            ["command", "path"],
            command=_one_of("view create str_replace insert"), **_EDIT, view_range=_RANGE,
        ),
    ),
    "memory": (
        "Keeps notes in files below /memories, which persist between conversations.",
        _schema(
            ["command"],
            command=_one_of("view create str_replace insert delete rename"),
            **_EDIT, old_path=_TEXT, new_path=_TEXT, view_range=_RANGE,
        ),
    ),
}  # fmt: skip
_SEARCH = "tool_search_tool"


def read_tools(
    tools: Sequence[Mapping[str, Any]], choice: AnthropicToolChoice | None, level: StrictLevel
) -> tuple[list[Function], ToolChoice]:
    """Reads tools and choice. ``level``: --tool-strict-level.

    Raises ``RequestError`` with the tool's index, or for an invalid choice.
    """
    functions: list[Function] = []
    for position, tool in enumerate(tools):
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith(_SEARCH):
            continue  # no effect: the prompt always contains all tools
        functions.append(_read(tool, kind, f"tools[{position}]"))
    check_distinct([function.tool for function in functions], "tools")
    chosen = read_tool_choice(_choice(choice), functions, "tool_choice")
    if chosen.mode != "required" and level != "parameter":  # else the schemas apply
        functions = [_objects(function) for function in functions]
    return functions, chosen


def _read(tool: Mapping[str, Any], kind: Any, path: str) -> Function:
    if kind in (None, "custom"):
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise invalid(f"{path}.input_schema", "must be a JSON Schema")
        given = {key: tool.get(key) for key in ("name", "description", "strict")}
        return replace(read_function({**given, "parameters": schema}, path), param=f"{path}.input_schema")
    found = _DEFINED.get(str(kind).rpartition("_")[0])
    if found is None:
        raise unsupported(
            f"{path}.type", f"tools of type {str(kind)[:64]!r} are not supported; define a custom tool"
        )
    description, schema = found
    return read_function({"name": tool.get("name"), "description": description, "parameters": schema}, path)


def _objects(function: Function) -> Function:
    """Requires arguments to be an object, since they are returned as JSON values."""
    return function if function.strict else replace(function, text=make.json_object(function.param))


def _choice(choice: AnthropicToolChoice | None) -> Any:
    """Converts the choice to OpenAI's form."""
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "name": choice.name}
    return "required" if choice.type == "any" else choice.type
