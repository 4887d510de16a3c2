"""Calls to built-in tools in the input: validation, and comparison with stored items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chorale.api.responses.items.fields import read_head
from chorale.errors import RequestError, invalid
from chorale.requests.readers import optional_string, read_string
from chorale.store.protocol import Item, present


def _web_search_call(item: Mapping[str, Any], path: str) -> Item:
    action = item.get("action")
    if action is None:
        action = {"type": "search", "query": ""}
    if not isinstance(action, Mapping) or action.get("type") not in ("search", "open_page", "find_in_page"):
        raise invalid(f"{path}.action", "must be a search, open_page or find_in_page action")
    for key in ("query", "url", "pattern"):
        optional_string(action, key, f"{path}.action")
    queries = action.get("queries") or []
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise invalid(f"{path}.action.queries", "must be a list of strings")
    results = item.get("results")
    if not isinstance(results, list | None):
        raise invalid(f"{path}.results", "must be a list")
    return {**read_head(item, "web_search_call"), "action": dict(action), **present(results=results)}


def _code_interpreter_call(item: Mapping[str, Any], path: str) -> Item:
    code, outputs = optional_string(item, "code", path), item.get("outputs")
    if not isinstance(outputs, list | None):
        raise invalid(f"{path}.outputs", "must be a list")
    for position, output in enumerate(outputs or []):
        if not isinstance(output, Mapping) or not isinstance(output.get("logs"), str):
            raise RequestError(
                f"{path}.outputs[{position}]: only logs are supported: the model takes text only",
                param=f"{path}.outputs[{position}]",
                code="unsupported_content_type",
            )
    container = item.get("container_id")
    return {
        **read_head(item, "code_interpreter_call"),
        "code": code or "",
        "container_id": container if isinstance(container, str) else "",
        "outputs": outputs,
    }


def _mcp_call(item: Mapping[str, Any], path: str) -> Item:
    return {
        **read_head(item, "mcp_call"),
        **_named(item, path),
        "output": optional_string(item, "output", path),
        "error": item.get("error"),
        "approval_request_id": item.get("approval_request_id"),
    }


def _mcp_approval_request(item: Mapping[str, Any], path: str) -> Item:
    return {**read_head(item, "mcp_approval_request", status=False), **_named(item, path)}


def _named(item: Mapping[str, Any], path: str) -> Item:
    return {
        "server_label": read_string(item, "server_label", path),
        "name": read_string(item, "name", path),
        "arguments": optional_string(item, "arguments", path) or "{}",
    }


def _mcp_list_tools(item: Mapping[str, Any], path: str) -> Item:
    tools = item.get("tools")
    return {
        **read_head(item, "mcp_list_tools", status=False),
        "server_label": read_string(item, "server_label", path),
        "tools": tools if isinstance(tools, list) else [],
        **present(error=item.get("error")),
    }


def _mcp_approval_response(item: Mapping[str, Any], path: str) -> Item:
    approve = item.get("approve")
    if not isinstance(approve, bool):
        raise invalid(f"{path}.approve", "must be true or false")
    return {
        **read_head(item, "mcp_approval_response", status=False),
        "approval_request_id": read_string(item, "approval_request_id", path),
        "approve": approve,
        **present(reason=optional_string(item, "reason", path)),
    }


PARSERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "web_search_call": _web_search_call,
    "code_interpreter_call": _code_interpreter_call,
    "mcp_call": _mcp_call,
    "mcp_list_tools": _mcp_list_tools,
    "mcp_approval_request": _mcp_approval_request,
    "mcp_approval_response": _mcp_approval_response,
}


_COMPARED = {
    "web_search_call": ("action",),
    "code_interpreter_call": ("code",),
    "mcp_call": ("server_label", "name", "arguments"),
    "mcp_approval_request": ("server_label", "name", "arguments"),
}


def same_built_in(stored: Item, given: Item) -> bool:
    """Returns whether a client's item equals the stored one; optional parts of an action may be missing."""
    for key in _COMPARED.get(given["type"], ()):
        ours, theirs = stored[key], given[key]
        if isinstance(ours, Mapping):
            optional = ("sources", "queries")
            ours = {name: value for name, value in ours.items() if name not in optional and value is not None}
            theirs = {name: theirs.get(name) for name in ours}
        if ours != theirs:
            return False
    return True
