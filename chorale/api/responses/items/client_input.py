"""Input items of client-side calls and of their outputs. Each reader raises ``RequestError``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chorale.api.responses.items.fields import read_head, read_parts, read_status
from chorale.api.responses.tools import list_tools, shown_tool
from chorale.errors import invalid, unsupported
from chorale.requests.client_tools import PATCH_OPERATIONS
from chorale.requests.prompt import TOOL_NAME
from chorale.requests.readers import optional_string, read_arguments, read_mapping, read_string
from chorale.store.protocol import Item, present


def _function_call(item: Mapping[str, Any], path: str) -> Item:
    return _call(item, path) | _name(item, path) | {"arguments": read_arguments(item, path)}


def _custom_tool_call(item: Mapping[str, Any], path: str) -> Item:
    given = read_string(item, "input", path, empty=True)
    return _call(item, path) | _name(item, path) | {"input": given}


def _call(item: Mapping[str, Any], path: str) -> Item:
    head = read_head(item, item["type"], status=False)
    return head | {"call_id": read_string(item, "call_id", path), "status": read_status(item)}


def _name(item: Mapping[str, Any], path: str) -> Item:
    """Reads the tool's name, and its namespace if it has one."""
    found: Item = {}
    for key in ("name", "namespace"):
        if key == "namespace" and item.get(key) is None:
            continue
        found[key] = read_string(item, key, path)
        if TOOL_NAME.fullmatch(found[key]) is None:
            raise invalid(f"{path}.{key}", "must be 1 to 64 letters, digits, underscores, dots or dashes")
    return found


def _local_shell_call(item: Mapping[str, Any], path: str) -> Item:
    given = read_mapping(item, "action", path)
    action = {
        "type": "exec",
        "command": _strings(given, "command", f"{path}.action"),
        "env": given.get("env") or {},
        **present(**{key: given.get(key) for key in ("timeout_ms", "user", "working_directory")}),
    }
    return _call(item, path) | {"action": action}


def _shell_call(item: Mapping[str, Any], path: str) -> Item:
    given = read_mapping(item, "action", path)
    action = {
        "commands": _strings(given, "commands", f"{path}.action"),
        "timeout_ms": given.get("timeout_ms"),
        "max_output_length": given.get("max_output_length"),
    }
    return _call(item, path) | {"action": action, "environment": {"type": "local"}}


def _apply_patch_call(item: Mapping[str, Any], path: str) -> Item:
    given = read_mapping(item, "operation", path)
    kind = given.get("type")
    if kind not in PATCH_OPERATIONS:
        raise invalid(f"{path}.operation.type", f"must be one of {', '.join(PATCH_OPERATIONS)}")
    # Empty strings are allowed: the client reports a missing path to the model and sends the call back.
    operation = {"type": kind}
    for key in ("path",) if kind == "delete_file" else ("path", "diff"):
        operation[key] = read_string(given, key, f"{path}.operation", empty=True)
    return _call(item, path) | {"operation": operation}


def _tool_search_call(item: Mapping[str, Any], path: str) -> Item:
    _client_executed(item, path)
    return _call(item, path) | {"execution": "client", "arguments": item.get("arguments") or {}}


def _client_executed(item: Mapping[str, Any], path: str) -> None:
    if item.get("execution", "client") != "client":
        raise unsupported(
            f"{path}.execution", "only 'client' is supported; this server loads deferred tools immediately"
        )


# --------------------------------------------------------------------------- outputs


def _text_output(item: Mapping[str, Any], path: str) -> Item:
    """Reads an output that consists of a string or of text parts."""
    output = item.get("output")
    if not isinstance(output, str):
        output = read_parts(output, "tool", f"{path}.output")
    return _call(item, path) | {"output": output}


def _local_shell_call_output(item: Mapping[str, Any], path: str) -> Item:
    """Reads an output. OpenAI's form has the call's id in ``id``, some clients use ``call_id``."""
    call_id = item.get("call_id") or item.get("id")
    return _text_output({**item, "call_id": call_id, "id": None}, path)


def _shell_call_output(item: Mapping[str, Any], path: str) -> Item:
    output = item.get("output")
    if isinstance(output, str):  # some clients send a single string
        output = [{"stdout": output, "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    if not isinstance(output, list) or not all(isinstance(part, Mapping) for part in output):
        raise invalid(f"{path}.output", "must be a list of outputs")
    parts = [_shell_output(part, f"{path}.output[{index}]") for index, part in enumerate(output)]
    limit = {"max_output_length": item.get("max_output_length")}
    return _call(item, path) | {"output": parts} | limit


def _shell_output(part: Mapping[str, Any], path: str) -> Item:
    outcome = part.get("outcome")
    if not isinstance(outcome, Mapping) or outcome.get("type") not in ("exit", "timeout"):
        raise invalid(f"{path}.outcome", "must be of type 'exit' or 'timeout'")
    found: Item = {}
    for key in ("stdout", "stderr"):
        text = part.get(key, "")
        if not isinstance(text, str):
            raise invalid(f"{path}.{key}", "must be a string")
        found[key] = text
    kept = {"type": outcome["type"]}
    if outcome["type"] == "exit":
        kept["exit_code"] = outcome.get("exit_code", 0)
    return found | {"outcome": kept}


def _apply_patch_call_output(item: Mapping[str, Any], path: str) -> Item:
    status = item.get("status")
    if status not in ("completed", "failed"):
        raise invalid(f"{path}.status", "must be 'completed' or 'failed'")
    output = optional_string(item, "output", path)
    return _call(item, path) | {"status": status} | present(output=output)


def _tool_search_output(item: Mapping[str, Any], path: str) -> Item:
    _client_executed(item, path)
    return _call(item, path) | {"execution": "client", "tools": _tools(item, path)}


def _additional_tools(item: Mapping[str, Any], path: str) -> Item:
    head = read_head(item, "additional_tools", status=False)
    return head | {"role": "developer", "tools": _tools(item, path)}


# --------------------------------------------------------------------------- readers


def _tools(item: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Checks the list of tools; ``tools.read_tools`` checks each tool."""
    return [shown_tool(tool, f"{path}.tools[{index}]") for index, tool in enumerate(list_tools(item, path))]


def _strings(given: Mapping[str, Any], key: str, path: str) -> list[str]:
    value = given.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise invalid(f"{path}.{key}", "must be a list of strings")
    return value


PARSERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_tool_call,
    "local_shell_call": _local_shell_call,
    "shell_call": _shell_call,
    "apply_patch_call": _apply_patch_call,
    "tool_search_call": _tool_search_call,
    "function_call_output": _text_output,
    "custom_tool_call_output": _text_output,
    "local_shell_call_output": _local_shell_call_output,
    "shell_call_output": _shell_call_output,
    "apply_patch_call_output": _apply_patch_call_output,
    "tool_search_output": _tool_search_output,
    "additional_tools": _additional_tools,
}
