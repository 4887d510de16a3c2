"""Parsing of requests for built-in tools: ``web_search``, ``code_interpreter`` and ``mcp``.

They mean the same on every endpoint. Other types that no client runs (``file_search``) are not served.
``open_built_in.py`` decides what happens if a tool is not available.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from chorale.errors import invalid, unsupported
from chorale.requests.readers import (
    one_of,
    optional,
    optional_flag,
    optional_mapping,
    optional_string,
    read_strings,
)
from chorale.tools.contract import (
    BuiltInRequest,
    CodeInterpreterRequest,
    McpRequest,
    RequestTools,
    WebSearchRequest,
)

# Current and former types of built-in tools, with their names in ``tool_choice``. MCP servers use labels.
BUILT_IN_NAMES: dict[str, str] = {
    "web_search": "web_search",
    "web_search_2025_08_26": "web_search",
    "web_search_preview": "web_search",
    "web_search_preview_2025_03_11": "web_search",
    "code_interpreter": "code_interpreter",
}
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MEMORY = {"1g": 2**30, "4g": 4 * 2**30, "16g": 16 * 2**30, "64g": 64 * 2**30}
_read_size = optional(one_of("low", "medium", "high"), "medium")
_read_memory = optional(one_of(*_MEMORY), None)
_MCP_KEYS = {
    "type", "server_label", "server_url", "server_description", "headers", "authorization", "allowed_tools",
    "require_approval", "allowed_callers", "defer_loading", "connector_id", "tunnel_id",
}  # fmt: skip


def read_web_search(tool: Mapping[str, Any], path: str) -> WebSearchRequest:
    """Raises ``RequestError`` naming the field."""
    filters = optional_mapping(tool, "filters", path)
    domains: list[str] = []
    if filters.get("allowed_domains"):
        domains = read_strings(filters, "allowed_domains", f"{path}.filters")
    if len(domains) > 100 or "" in domains:
        raise invalid(f"{path}.filters.allowed_domains", "must be at most 100 domains")
    kinds = tool.get("search_content_types")
    if kinds is not None and not (isinstance(kinds, list) and "text" in kinds):
        raise unsupported(f"{path}.search_content_types", "the model takes text only")
    access = optional_flag(tool, "external_web_access", path)
    location = optional_mapping(tool, "user_location", path)
    # Chat nests the location.
    nested = optional_mapping(location, "approximate", f"{path}.user_location")
    return WebSearchRequest(
        allowed_domains=tuple(domains),
        context_size=_read_size(tool, "search_context_size", path),
        external_access=access is not False,
        user_location=_location(nested or location, f"{path}.user_location"),
    )


def _location(location: Mapping[str, Any], path: str) -> str | None:
    parts = []
    for key in ("city", "region", "country", "timezone"):
        value = optional_string(location, key, path)
        if value and key != "timezone":
            parts.append(value[:100])
    return ", ".join(parts) or None


def read_code_interpreter(tool: Mapping[str, Any], path: str) -> CodeInterpreterRequest:
    """Raises ``RequestError`` naming the field."""
    container = tool.get("container")
    if isinstance(container, str):
        return CodeInterpreterRequest(container_id=container)
    if container is None:
        return CodeInterpreterRequest()
    if not isinstance(container, Mapping) or container.get("type", "auto") != "auto":
        raise invalid(f"{path}.container", "must be an id, or an object of type auto")
    if container.get("file_ids"):
        raise unsupported(f"{path}.container.file_ids", "there are no uploaded files here")
    policy = optional_mapping(container, "network_policy", f"{path}.container")
    if policy.get("type", "disabled") != "disabled":
        raise unsupported(f"{path}.container.network_policy", "code has no network here")
    limit = _read_memory(container, "memory_limit", f"{path}.container")
    return CodeInterpreterRequest(memory_bytes=_MEMORY.get(limit))


# vLLM's labels of the built-in tools.
_VLLM_LABELS = {"code_interpreter": "python", "container": "python", "web_search_preview": "browser"}


def own_label(label: str) -> str:
    """Returns this server's label for an MCP server without an address."""
    return _VLLM_LABELS.get(label, label)


def read_mcp(tool: Mapping[str, Any], path: str, *, approvals: bool) -> McpRequest:
    """``approvals``: the endpoint has them. Raises ``RequestError`` naming the field."""
    for key in tool:
        if key not in _MCP_KEYS:
            raise invalid(f"{path}.{str(key)[:64]}", "unknown key of an mcp tool")
    label = tool.get("server_label")
    if not isinstance(label, str) or _LABEL.fullmatch(label) is None or label == "functions":
        raise invalid(
            f"{path}.server_label", "must be 1 to 64 letters, digits, underscores or dashes, not 'functions'"
        )
    for key in ("connector_id", "tunnel_id"):
        if tool.get(key) is not None:
            raise unsupported(f"{path}.{key}", "is a service of OpenAI's; give a server_url")
    callers = tool.get("allowed_callers")
    if callers is not None and not (isinstance(callers, list) and "direct" in callers):
        raise unsupported(f"{path}.allowed_callers", "the model calls directly")
    names, read_only = _read_filter(tool.get("allowed_tools"), f"{path}.allowed_tools")
    url = optional_string(tool, "server_url", path)
    label = label if url is not None else own_label(label)
    asked = tool.get("require_approval")
    if asked is None and url is None:
        asked = "never"  # a server configured by the operator
    require, never, always = _read_approval(asked, path, approvals)
    return McpRequest(
        server_label=label,
        server_url=url,
        headers=_headers(tool, path),
        authorization=optional_string(tool, "authorization", path),
        allowed_tools=names,
        read_only=read_only,
        require_approval=require,
        never_approve=never,
        always_approve=always,
        description=optional_string(tool, "server_description", path),
    )


def _read_filter(value: Any, path: str) -> tuple[frozenset[str] | None, bool | None]:
    """Returns the names (None for all) and ``read_only`` (None for either)."""
    if value is None:
        return None, None
    names, read_only = value, None
    if isinstance(value, Mapping):
        names, read_only = value.get("tool_names"), optional_flag(value, "read_only", path)
    if names is None:
        return None, read_only
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise invalid(path, "must be a list of names, or an object with tool_names or read_only")
    return frozenset(names), read_only


def _read_approval(value: Any, path: str, approvals: bool) -> tuple[bool, frozenset[str], frozenset[str]]:
    path = f"{path}.require_approval"
    if not approvals:
        if value not in (None, "never"):
            raise unsupported(path, "approvals need /v1/responses; 'never' is possible here")
        return False, frozenset(), frozenset()
    if value in (None, "always"):
        return True, frozenset(), frozenset()
    if value == "never":
        return False, frozenset(), frozenset()
    if not isinstance(value, Mapping) or not value.keys() <= {"always", "never"}:
        raise invalid(path, "must be 'always', 'never', or an object with lists of tools")
    found: dict[str, frozenset[str]] = {}
    for key in ("never", "always"):
        names, read_only = _read_filter(value.get(key), f"{path}.{key}")
        if read_only is not None:
            raise unsupported(f"{path}.{key}.read_only", "name the tools")
        found[key] = names or frozenset()
    # Tools in neither list need an approval, unless only the other list is present.
    return not found["always"] or bool(found["never"]), found["never"], found["always"]


def _headers(tool: Mapping[str, Any], path: str) -> Mapping[str, str] | None:
    headers = tool.get("headers")
    if headers is None:
        return None
    fine = isinstance(headers, Mapping) and len(headers) <= 64
    for name, value in headers.items() if fine else ():
        fine = fine and isinstance(value, str) and not re.search(r"[\r\n\0]", f"{name}{value}")
    if not fine:
        raise invalid(f"{path}.headers", "must be an object of at most 64 strings, each one line")
    return dict(headers)


def without_secrets(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an mcp tool for echoes and storage, without its credentials."""
    shown = {key: value for key, value in tool.items() if key != "authorization"}
    headers = shown.get("headers")
    if isinstance(headers, Mapping):
        shown["headers"] = dict.fromkeys(headers, "<redacted>")
    return shown


def read_built_in(
    tools: Sequence[tuple[str, Mapping[str, Any]]], names: Sequence[str], *, approvals: bool
) -> BuiltInRequest:
    """``tools``: (path, tool) of every type that the client does not run; ``names``: those of the template
    option ``builtin_tools``; ``approvals``: whether the endpoint has them. Raises ``RequestError``.
    """
    web: WebSearchRequest | None = None
    code: CodeInterpreterRequest | None = None
    mcp: list[McpRequest] = []
    paths: dict[str, str] = {}
    unserved: list[tuple[str, str]] = []
    for path, tool in (*tools, *_named(names, "chat_template_kwargs.builtin_tools")):
        kind = tool["type"]
        name = BUILT_IN_NAMES.get(kind)
        if name == "web_search":
            web = read_web_search(tool, path)
        elif name == "code_interpreter":
            code = read_code_interpreter(tool, path)
        elif kind == "mcp":
            mcp.append(read_mcp(tool, path, approvals=approvals))
            name = f"mcp:{mcp[-1].server_label}"
        if name is None:
            unserved.append((kind, path))
        elif name in paths:
            raise invalid(path, f"{name} is declared twice")
        else:
            paths[name] = path
    return BuiltInRequest(RequestTools(web, code, tuple(mcp)), tuple(paths.items()), tuple(unserved))


def _named(names: Sequence[str], path: str) -> list[tuple[str, dict[str, Any]]]:
    types = {"browser": "web_search", "python": "code_interpreter"}
    for name in names:
        if name not in types:
            raise invalid(path, f"{name[:64]!r} is not one of {', '.join(types)}")
    return [(path, {"type": types[name]}) for name in dict.fromkeys(names)]
