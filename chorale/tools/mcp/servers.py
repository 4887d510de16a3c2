"""Addresses of MCP servers, from the operator's flags and file or from a request.

A request's server is subject to the rules of the browser's fetches (no private addresses); a configured
server may have any address. Only the operator's file can name programs (stdio).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chorale.errors import ConfigError
from chorale.tools.contract import McpRequest
from chorale.tools.errors import ToolError
from chorale.tools.mcp.client import McpClient, McpLimits
from chorale.tools.mcp.transport import SsePair, Stdio, StreamableHttp, Transport, http_client
from chorale.tools.mcp.wire import McpError
from chorale.tools.net.addresses import AddressPolicy
from chorale.tools.net.urls import parse_url

RESERVED = frozenset(
    {"functions", "browser", "python", "container", "assistant", "system", "developer", "user"}
)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]{0,8192}")
_OURS = frozenset({
    "host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "accept",
    "content-type",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server over HTTP. ``urls`` are tried in order: (address, whether it is the older SSE transport)."""

    urls: tuple[tuple[str, bool], ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    trusted: bool = False  # configured by the operator: any address is allowed


@dataclass(frozen=True, slots=True)
class StdioServer:
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


Server = HttpServer | StdioServer


def fault_of(server: Server) -> str | None:
    """Returns why a configured program cannot start, else None. Addresses are not checked."""
    if not isinstance(server, StdioServer):
        return None
    program, folders = server.argv[0], os.get_exec_path(dict(server.environment))
    if shutil.which(program, path=os.pathsep.join(folders)) is None:
        return f"its program {program!r} is not installed"
    return None


def session_header(session_key: str) -> str:
    """Derives a session id for a server that does not reveal the key."""
    return hashlib.sha256(b"chorale mcp session " + session_key.encode()).hexdigest()[:32]


def client_of(server: Server, limits: McpLimits, session_key: str, *, allow_private: bool) -> McpClient:
    """Returns a client that is not connected yet."""
    if isinstance(server, StdioServer):
        program = server
        return McpClient([lambda: Stdio(program.argv, program.environment)], limits)
    headers = {"x-session-id": session_header(session_key)} | dict(server.headers)
    policy = AddressPolicy(allow_private=server.trusted or allow_private)

    def maker(url: str, older: bool) -> Callable[[], Transport]:
        kind = SsePair if older else StreamableHttp
        return lambda: kind(http_client(headers, policy), url)

    return McpClient([maker(url, older) for url, older in server.urls], limits)


def from_request(request: McpRequest) -> HttpServer:
    """Returns the server of a request. Raises ``McpError`` for invalid headers or an invalid address."""
    url = request.server_url or ""
    try:
        parse_url(url)
    except ToolError as fault:
        raise McpError(f"server_url: {fault.message}") from None
    headers = dict(request.headers or {})
    if request.authorization:
        headers["Authorization"] = f"Bearer {request.authorization}"
    for name, value in headers.items():
        if name.lower() in _OURS or not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise McpError(f"the header {name[:80]!r} cannot be sent")
    return HttpServer(_guesses(url), headers)


def from_flag(entry: str) -> HttpServer:
    """Parses ``host:port``, as in vLLM's ``--tool-server``, or a complete address. Raises ``ConfigError``."""
    try:
        if "://" in entry:
            parse_url(entry)
            return HttpServer(_guesses(entry), trusted=True)
        parsed = parse_url(f"http://{entry}/")
        if parsed.port is None or parsed.path != "/" or parsed.query:
            raise ToolError("a port is missing")
    except ToolError as fault:
        raise ConfigError(
            f"--tool-server {entry}: {fault.message} (expected demo, HOST:PORT, or a URL)"
        ) from None
    return HttpServer(((f"http://{entry}/sse", True), (f"http://{entry}/mcp", False)), trusted=True)


def _guesses(url: str) -> tuple[tuple[str, bool], ...]:
    """Returns the transports to try: the older one for an address that ends in /sse, else both."""
    older = url.split("?")[0].rstrip("/").endswith("/sse")
    return ((url, older), (url, not older))


def read_mcp_config(path: str, environment: Mapping[str, str]) -> dict[str, Server]:
    """Reads the operator's file: ``{"mcpServers": {label: {"command", "args", "env"} or {"url",
    "headers"}}}``.

    ``${NAME}`` in values is replaced from the environment, so that the file needs no secrets. Raises
    ``ConfigError``.
    """
    try:
        loaded = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--mcp-config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--mcp-config {path}: not valid JSON: {error}") from None
    servers = loaded.get("mcpServers") if isinstance(loaded, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f'--mcp-config {path}: must be an object with "mcpServers"')
    found = {}
    for label, entry in servers.items():
        try:
            found[label] = _entry(label, entry, environment)
        except (ToolError, ValueError) as error:
            raise ConfigError(f"--mcp-config {path}: {label}: {error}") from None
    return found


def _entry(label: str, entry: Any, environment: Mapping[str, str]) -> Server:
    if namespace_name(label) != label:
        raise ValueError("a label may contain letters, digits, - and _ only, and must not be a built-in name")
    if not isinstance(entry, dict):
        raise ValueError("must be an object")
    unknown = entry.keys() - {"command", "args", "env", "url", "headers", "type"}
    if unknown or ("command" in entry) == ("url" in entry):
        raise ValueError("must have either command (with args, env) or url (with headers, type)")
    if "url" in entry:
        url = _filled(entry["url"], environment)
        parse_url(url)
        headers = _strings(entry, "headers", environment)
        for name, value in headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ValueError(f"the header {name[:80]!r} cannot be sent")
        older = entry.get("type") == "sse"
        urls = ((url, older),) if "type" in entry else _guesses(url)
        return HttpServer(urls, headers, trusted=True)
    args = entry.get("args") or []
    if not isinstance(args, list):
        raise ValueError("args must be a list")
    argv = tuple(_filled(word, environment) for word in [entry["command"], *args])
    basic = {name: environment[name] for name in ("PATH", "HOME", "LANG") if name in environment}
    return StdioServer(argv, basic | _strings(entry, "env", environment))


def _strings(entry: Mapping[str, Any], field_name: str, environment: Mapping[str, str]) -> dict[str, str]:
    given = entry.get(field_name) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{field_name} must be an object")
    return {str(name): _filled(value, environment) for name, value in given.items()}


def _filled(value: Any, environment: Mapping[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        if match.group(1) not in environment:
            raise ValueError(f"the environment variable {match.group(1)} is not set")
        return environment[match.group(1)]

    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return os.path.expanduser(re.sub(r"\$\{(\w+)\}", replace, value))


def namespace_name(label: str) -> str:
    """Converts a label to a harmony namespace. Raises ``McpError`` if no valid character is left."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", label)[:64]
    if not name.strip("_-") or name.lower() in RESERVED:
        raise McpError(f"{label[:80]!r} cannot be the label of a server")
    return name
