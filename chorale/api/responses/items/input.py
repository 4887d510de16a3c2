"""Input items in the form in which they are stored, listed and rendered: a table of the fields of each kind.

Clients return items as they received them, without null fields or ids, or with unknown keys; all of these are
accepted. Unsupported content (images, files, calls of unavailable tools) is refused with its type and index,
never silently dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.api.responses.items.encrypted_content import Budget, unseal
from chorale.api.responses.items.fields import (
    read_content,
    read_execution,
    read_output,
    read_status,
    read_tool_name,
    reasoning_parts,
)
from chorale.api.responses.tools import list_tools, shown_tool
from chorale.errors import RequestError, invalid
from chorale.ids import new_id
from chorale.requests.client_tools import PATCH_OPERATIONS
from chorale.requests.readers import (
    ABSENT,
    Object,
    Reader,
    always,
    as_given,
    nested,
    of_type,
    one_of,
    optional,
    optional_list,
    optional_string,
    read_arguments,
    read_fields,
    read_flag,
    read_mapping,
    read_string,
    read_strings,
    read_text,
)
from chorale.store.protocol import ITEM_ID, Item
from chorale.turns.events import ID_PREFIX

ROLES = ("user", "assistant", "system", "developer")
_ACTIONS = ("search", "open_page", "find_in_page")
_ID_PREFIX: dict[str, str] = {
    **ID_PREFIX, "function_call_output": "fco", "custom_tool_call_output": "cto",
    "local_shell_call_output": "lso", "shell_call_output": "sho", "apply_patch_call_output": "apo",
    "tool_search_output": "tso", "additional_tools": "at", "mcp_approval_response": "mcpa",
    "compaction_trigger": "cmt",
}  # fmt: skip


def parse_items(raw: list[dict[str, Any]], path: str = "input") -> list[Item]:
    """Parses items. Raises ``RequestError`` with the index of the first invalid item in ``path``."""
    budget = Budget()
    items = [_parse_item(item, f"{path}[{position}]", budget) for position, item in enumerate(raw)]
    for position, item in enumerate(items[:-1]):
        if item["type"] == "compaction_trigger":
            raise invalid(f"{path}[{position}]", "a compaction_trigger must be the last item")
    return items


def _parse_item(item: Object, path: str, budget: Budget) -> Item:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind == "item_reference":
        return {"type": kind, "id": read_string(item, "id", path)}
    if not isinstance(kind, str) or kind not in _KINDS:
        raise RequestError(
            f"{path}.type: items of type {str(kind)[:64]!r} are not supported",
            param=f"{path}.type",
            code="unsupported_item_type",
        )
    if kind == "local_shell_call_output":  # OpenAI's form has the call's id in ``id``
        item = {**item, "call_id": item.get("call_id") or item.get("id"), "id": None}
    parsed = {"id": _item_id(item, kind), "type": kind, **read_fields(item, _KINDS[kind], path)}
    if (
        kind == "compaction"
        and unseal(parsed["encrypted_content"], f"{path}.encrypted_content", budget) is None
    ):
        raise invalid(f"{path}.encrypted_content", "was not created by this server")
    return parsed


def _item_id(item: Object, kind: str) -> str:
    """Returns the id. Every listed item needs one: an item without a valid id gets a new one."""
    found = item.get("id")
    if isinstance(found, str) and ITEM_ID.fullmatch(found) is not None:
        return found
    return new_id(_ID_PREFIX[kind])


# --------------------------------------------------------------------------- fields of single kinds


def _phase(item: Object, key: str, path: str) -> Any:
    return item[key] if item.get(key) in ("commentary", "final_answer") else ABSENT


def _tools(item: Object, key: str, path: str) -> list[dict[str, Any]]:
    """Checks the list of tools; ``tools.read_tools`` checks each tool."""
    return [shown_tool(tool, f"{path}.{key}[{index}]") for index, tool in enumerate(list_tools(item, path))]


def _object(item: Object, key: str, path: str) -> Any:
    return item.get(key) or {}


def _operation(item: Object, key: str, path: str) -> Item:
    given, path = read_mapping(item, key, path), f"{path}.{key}"
    operation = {"type": one_of(*PATCH_OPERATIONS)(given, "type", path)}
    # Empty strings are allowed: the client reports a missing path to the model and sends the call back.
    for name in ("path",) if operation["type"] == "delete_file" else ("path", "diff"):
        operation[name] = read_text(given, name, path)
    return operation


def _shell_outputs(item: Object, key: str, path: str) -> list[Item]:
    output, path = item.get(key), f"{path}.{key}"
    if isinstance(output, str):  # some clients send a single string
        output = [{"stdout": output, "outcome": {"type": "exit"}}]
    if not isinstance(output, list) or not all(isinstance(part, Mapping) for part in output):
        raise invalid(path, "must be a list of outputs")
    # The texts may be absent, but not null.
    parts = [{"stdout": "", "stderr": "", **part} for part in output]
    return [read_fields(part, _SHELL_OUTPUT, f"{path}[{index}]") for index, part in enumerate(parts)]


def _outcome(part: Object, key: str, path: str) -> Item:
    outcome = part.get(key)
    if not isinstance(outcome, Mapping) or outcome.get("type") not in ("exit", "timeout"):
        raise invalid(f"{path}.{key}", "must be of type 'exit' or 'timeout'")
    ended = {"exit_code": outcome.get("exit_code", 0)} if outcome["type"] == "exit" else {}
    return {"type": outcome["type"], **ended}


_SHELL_OUTPUT: dict[str, Reader] = {"stdout": read_text, "stderr": read_text, "outcome": _outcome}


def _action(item: Object, key: str, path: str) -> Item:
    action, path = item.get(key), f"{path}.{key}"
    if action is None:
        action = {"type": "search", "query": ""}
    if not isinstance(action, Mapping) or action.get("type") not in _ACTIONS:
        raise invalid(path, "must be a search, open_page or find_in_page action")
    for name in ("query", "url", "pattern"):
        optional_string(action, name, path)
    if action.get("queries"):
        read_strings(action, "queries", path)
    return dict(action)


def _code_outputs(item: Object, key: str, path: str) -> list[Any] | None:
    outputs = optional_list(item, key, path)
    for position, output in enumerate(outputs or []):
        if not isinstance(output, Mapping) or not isinstance(output.get("logs"), str):
            raise RequestError(
                f"{path}.{key}[{position}]: only logs are supported: the model takes text only",
                param=f"{path}.{key}[{position}]",
                code="unsupported_content_type",
            )
    return outputs


def _arguments(item: Object, key: str, path: str) -> str:
    return optional_string(item, key, path) or "{}"


# --------------------------------------------------------------------------- kinds

_STATUS: dict[str, Reader] = {"status": read_status}
_CALL: dict[str, Reader] = {"call_id": read_string, "status": read_status}
_NAME: dict[str, Reader] = {"name": read_tool_name, "namespace": optional(read_tool_name)}
_MCP_CALL: dict[str, Reader] = {
    "server_label": read_string, "name": read_string, "arguments": _arguments,
}  # fmt: skip
_LOCAL_ACTION: dict[str, Reader] = {
    "type": always("exec"), "command": read_strings, "env": _object, "timeout_ms": optional(as_given),
    "user": optional(as_given), "working_directory": optional(as_given),
}  # fmt: skip
_SHELL_ACTION: dict[str, Reader] = {
    "commands": read_strings, "timeout_ms": as_given, "max_output_length": as_given,
}  # fmt: skip

_KINDS: dict[str, dict[str, Reader]] = {
    "message": {**_STATUS, "role": one_of(*ROLES), "content": read_content, "phase": _phase},
    "reasoning": {
        "summary": reasoning_parts("summary_text"), "content": reasoning_parts("reasoning_text"),
        "encrypted_content": of_type(str), **_STATUS,
    },
    "compaction": {"encrypted_content": read_string},
    "compaction_trigger": {},
    # Calls that the client runs, and their outputs.
    "function_call": {**_CALL, **_NAME, "arguments": read_arguments},
    "custom_tool_call": {**_CALL, "input": read_text, **_NAME},
    "local_shell_call": {**_CALL, "action": nested(_LOCAL_ACTION)},
    "shell_call": {**_CALL, "action": nested(_SHELL_ACTION), "environment": always({"type": "local"})},
    "apply_patch_call": {**_CALL, "operation": _operation},
    "tool_search_call": {**_CALL, "execution": read_execution, "arguments": _object},
    "function_call_output": {**_CALL, "output": read_output},
    "custom_tool_call_output": {**_CALL, "output": read_output},
    "local_shell_call_output": {**_CALL, "output": read_output},
    "shell_call_output": {**_CALL, "output": _shell_outputs, "max_output_length": as_given},
    "apply_patch_call_output": {
        **_CALL, "status": one_of("completed", "failed"), "output": optional(read_text),
    },
    "tool_search_output": {**_CALL, "execution": read_execution, "tools": _tools},
    "additional_tools": {"role": always("developer"), "tools": _tools},
    # Calls to built-in tools.
    "web_search_call": {**_STATUS, "action": _action, "results": optional(optional_list)},
    "code_interpreter_call": {
        **_STATUS, "code": optional(read_text, ""), "container_id": of_type(str, ""),
        "outputs": _code_outputs,
    },
    "mcp_call": {
        **_STATUS, **_MCP_CALL, "output": optional_string, "error": as_given,
        "approval_request_id": as_given,
    },
    "mcp_approval_request": _MCP_CALL,
    "mcp_list_tools": {
        "server_label": read_string, "tools": of_type(list, []), "error": optional(as_given),
    },
    "mcp_approval_response": {
        "approval_request_id": read_string, "approve": read_flag, "reason": optional(read_text),
    },
}  # fmt: skip
