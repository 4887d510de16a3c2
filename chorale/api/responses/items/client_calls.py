"""Client-side calls and their outputs as items, and their conversion to harmony.

The text of a call is the model's output: JSON arguments, or the input of a custom tool. Outputs of every kind
become the text of a tool message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from chorale.harmony.json_text import MAX_CALL_DEPTH, read_object
from chorale.harmony.messages import FUNCTIONS, Message, function_call, tool_result
from chorale.requests.client_tools import PATCH_OPERATIONS, prompt_name
from chorale.requests.readers import Object, Reader, always, of_type, read_fields
from chorale.store.protocol import Item
from chorale.turns.events import CLIENT_CALLS, ItemOpened

# Items that contain the output of a call and follow it.
OUTPUTS = frozenset(
    {
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
        "tool_search_output",
    }
)
TOOL_LISTS = frozenset({"tool_search_output", "additional_tools"})  # items that declare tools


def is_call(item: Item) -> bool:
    return item["type"] in CLIENT_CALLS


# --------------------------------------------------------------------------- from the model


def call_object(opened: ItemOpened, status: str, text: str) -> Item:
    """Returns the item of a call. ``text`` may be incomplete unless ``status`` is ``completed``."""
    item: Item = {"id": opened.item_id, "type": opened.kind, "status": status, "call_id": opened.call_id}
    if opened.kind in ("function_call", "custom_tool_call"):
        item["name"] = opened.name
        item["arguments" if opened.kind == "function_call" else "input"] = text
        if opened.namespace is not None:
            item["namespace"] = opened.namespace
        return item
    given = read_object(text, strict=False, max_depth=MAX_CALL_DEPTH)
    if opened.kind == "local_shell_call":
        item["action"] = read_fields(given, _LOCAL_ACTION, "")
    elif opened.kind == "shell_call":
        item |= {"action": read_fields(given, _SHELL_ACTION, ""), "environment": {"type": "local"}}
    elif opened.kind == "apply_patch_call":
        item["operation"] = _operation(given)
        item["status"] = "in_progress" if status == "incomplete" else status  # the API has no "incomplete"
    else:
        item |= {"execution": "client", "arguments": given}
    return item


def _strings(given: Object, key: str, path: str) -> list[str]:
    value = given.get(key)
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _variables(given: Object, key: str, path: str) -> dict[str, str]:
    env = given.get(key)
    return {k: v for k, v in env.items() if isinstance(v, str)} if isinstance(env, Mapping) else {}


# The model's arguments may be incomplete, or not those of the schema.
_LOCAL_ACTION: dict[str, Reader] = {
    "type": always("exec"), "command": _strings, "env": _variables, "timeout_ms": of_type(int),
    "user": of_type(str), "working_directory": of_type(str),
}  # fmt: skip
_SHELL_ACTION: dict[str, Reader] = {
    "commands": _strings, "timeout_ms": of_type(int, None), "max_output_length": of_type(int, None),
}  # fmt: skip
_OPERATION: dict[str, Reader] = {"path": of_type(str, ""), "diff": of_type(str, "")}


def _operation(given: Object) -> dict[str, Any]:
    kind = given.get("type")
    operation = {"type": kind if kind in PATCH_OPERATIONS else "update_file"}
    operation |= read_fields(given, _OPERATION, "")
    if operation["type"] == "delete_file":
        del operation["diff"]
    return operation


# --------------------------------------------------------------------------- back to the model


def called_name(item: Item) -> str:
    """Returns the name of the called tool in the prompt."""
    if item["type"] in ("function_call", "custom_tool_call"):
        return prompt_name(item["name"], item.get("namespace"))
    return str(item["type"]).removesuffix("_call")


def call_text(item: Item) -> str:
    """Returns the text that the model may have written for a call item."""
    match item["type"]:
        case "function_call":
            return str(item["arguments"])
        case "custom_tool_call":
            return _encode({"input": item["input"]})
        case "apply_patch_call":
            return _encode({"diff": "", **item["operation"]})
        case "tool_search_call":
            return _encode(item["arguments"])
    action = {
        key: value for key, value in item["action"].items() if value not in (None, {}) and key != "type"
    }
    return _encode(action)


def call_message(item: Item, token_ids: tuple[int, ...] | None, freeform: Collection[str]) -> Message:
    """Converts a call. ``freeform``: prompt names of tools whose calls consist of plain input."""
    name = called_name(item)
    is_text = item["type"] == "custom_tool_call" and name in freeform
    call = function_call(name, item["input"] if is_text else call_text(item), is_json=not is_text)
    return replace(call, token_ids=token_ids)


def output_text(item: Item) -> str:
    """Returns the text of an output for the model."""
    match item["type"]:
        case "shell_call_output":
            return _encode(item["output"])
        case "apply_patch_call_output":
            text = {"status": item["status"]} | ({"output": item["output"]} if item.get("output") else {})
            return _encode(text)
        case "tool_search_output":
            return _encode({"loaded": [tool.get("name") or tool.get("type") for tool in item["tools"]]})
    output = item["output"]
    return (
        output
        if isinstance(output, str)
        else "".join(part.get("text") or part.get("refusal", "") for part in output)
    )


def output_message(item: Item, name: str) -> Message:
    """Converts an output. ``name``: ``called_name`` of the call."""
    return tool_result(f"{FUNCTIONS}.{name}", output_text(item))


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()
