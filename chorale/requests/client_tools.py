"""Tools that the client runs, other than plain functions: their form for the model.

The model is trained on functions with JSON arguments, so all of these become functions: a custom tool has one
string, ``input`` (with a grammar, a call is the string itself, under the grammar); shell, local_shell,
apply_patch and tool_search have the arguments that their items show; tools of a namespace are named
``NAMESPACE__NAME``. Calls are returned in the declared form (``CallForm``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chorale.errors import invalid
from chorale.grammar import constraint as make
from chorale.grammar.constraint import Constraint
from chorale.harmony.messages import FUNCTIONS, ToolDescription
from chorale.requests.prompt import function_tool
from chorale.requests.readers import read_string
from chorale.turns.functions import CallForm, Function

_STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
PATCH_OPERATIONS = ("create_file", "update_file", "delete_file")


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_LOCAL_SHELL = ToolDescription(
    "local_shell",
    "Runs one command on the user's machine, without a shell around it, and returns its output.",
    _object(
        ["command"],
        command={**_STRINGS, "description": "The program and its arguments."},
        working_directory={"type": "string"},
        timeout_ms={"type": "integer", "minimum": 1},
    ),
)
_SHELL = ToolDescription(
    "shell",
    "Runs shell commands in order and returns the output and exit code of each.",
    _object(
        ["commands"],
        commands=_STRINGS,
        timeout_ms={"type": "integer", "minimum": 1},
        max_output_length={"type": "integer", "minimum": 1},
    ),
)
_APPLY_PATCH = ToolDescription(
    "apply_patch",
    "Creates, updates or deletes one file. The diff has lines that begin with a space (context), + or -, "
    "behind lines of @@; of a new file every line begins with +. To delete a file, leave it empty.",
    _object(
        ["type", "path", "diff"],
        type={"type": "string", "enum": list(PATCH_OPERATIONS)},
        path={"type": "string"},
        diff={"type": "string"},
    ),
)
_TOOL_SEARCH = ToolDescription(
    "tool_search",
    "Finds further tools by what they do, and loads them.",
    _object(["query"], query={"type": "string"}),
)
_FIXED = {"local_shell": _LOCAL_SHELL, "shell": _SHELL, "apply_patch": _APPLY_PATCH}
NAMESPACE_SEPARATOR = "__"


def prompt_name(name: str, namespace: str | None) -> str:
    """Returns the model's name of a client's tool.

    The namespace ``functions`` is the model's own and adds no prefix.
    """
    return name if namespace in (None, FUNCTIONS) else f"{namespace}{NAMESPACE_SEPARATOR}{name}"


def fixed_tool(kind: str, param: str) -> Function:
    """Returns ``local_shell``, ``shell`` or ``apply_patch``, whose arguments are those of its item."""
    form = CallForm(f"{kind}_call", kind)  # type: ignore[arg-type]
    return Function(_FIXED[kind], True, param, form)


def tool_search(value: Mapping[str, Any], param: str) -> Function:
    """Returns a search that the client runs. Raises ``RequestError``."""
    read = function_tool({**value, "name": "tool_search"}, param)
    tool = replace(
        read,
        description=read.description or _TOOL_SEARCH.description,
        parameters=_TOOL_SEARCH.parameters if read.parameters is None else read.parameters,
    )
    return Function(tool, False, f"{param}.parameters", CallForm("tool_search_call", "tool_search"))


def custom_tool(value: Mapping[str, Any], param: str) -> Function:
    """Returns a tool for free text, or text of a grammar. Raises ``RequestError``."""
    tool = function_tool({"name": value.get("name"), "description": value.get("description")}, param)
    text = _format(value.get("format"), f"{param}.format")
    form = CallForm("custom_tool_call", tool.name, wrapped=text is None)
    if text is None:
        return Function(
            replace(tool, parameters=_object(["input"], input={"type": "string"})), False, param, form
        )
    constraint, note = text
    described = ToolDescription(tool.name, f"{tool.description}\n\n{note}".lstrip(), {"type": "string"})
    return Function(described, False, param, form, constraint)


def _format(value: Any, param: str) -> tuple[Constraint, str] | None:
    """Returns the grammar of the text and its description in the prompt, or None for any text."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind != "grammar":
        raise invalid(f"{param}.type", "must be 'text' or 'grammar'")
    nested = value.get("grammar")  # Chat's shape
    if isinstance(nested, Mapping):
        value, param = nested, f"{param}.grammar"
    definition, syntax = read_string(value, "definition", param), value.get("syntax")
    if syntax not in ("lark", "regex"):
        raise invalid(f"{param}.syntax", "must be 'lark' or 'regex'")
    made = (make.lark if syntax == "lark" else make.regex)(definition, f"{param}.definition")
    what = "this Lark grammar" if syntax == "lark" else "this regular expression"
    return made, f"A call is the input itself, no JSON around it, and matches {what}:\n{definition}"


def in_namespace(function: Function, namespace: str) -> Function:
    """Returns the same tool under its name with the namespace."""
    form = function.form or CallForm("function_call", function.name)
    tool = replace(function.tool, name=prompt_name(function.name, namespace))
    return replace(function, tool=tool, form=replace(form, namespace=namespace))
