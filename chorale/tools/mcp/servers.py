"""Where MCP servers are: from the operator's flags and file, or from a request; and how each is reached.

A request's server is reached under the rules of the browser's fetches (no private addresses); an operator's
server may be anywhere. Programs (stdio) come from the operator's file only.
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
from chorale.tools.net.transport import Resolve, system_resolve
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
    """``urls`` are tried in order: (address, whether it is the older SSE pair)."""

    urls: tuple[tuple[str, bool], ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    trusted: bool = False  # named by the operator: any address will do


@dataclass(frozen=True, slots=True)
class StdioServer:
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


Server = HttpServer | StdioServer


def fault_of(server: Server) -> str | None:
    """Why an operator's program can never start here; of an address that is known only once it is asked."""
    if not isinstance(server, StdioServer):
        return None
    program, places = server.argv[0], os.get_exec_path(dict(server.environment))
    if shutil.which(program, path=os.pathsep.join(places)) is None:
        return f"its program {program!r} is not installed"
    return None


def session_header(session_key: str) -> str:
    """What a server sees of the key: enough to keep a session, not enough to guess the key."""
    return hashlib.sha256(b"chorale mcp session " + session_key.encode()).hexdigest()[:32]


def client_of(
    server: Server,
    limits: McpLimits,
    session_key: str,
    *,
    allow_private: bool,
    resolve: Resolve = system_resolve,
) -> McpClient:
    """Not connected yet."""
    if isinstance(server, StdioServer):
        program = server
        return McpClient([lambda: Stdio(program.argv, program.environment)], limits)
    headers = {"x-session-id": session_header(session_key)} | dict(server.headers)
    policy = AddressPolicy(allow_private=server.trusted or allow_private)

    def maker(url: str, older: bool) -> Callable[[], Transport]:
        kind = SsePair if older else StreamableHttp
        return lambda: kind(http_client(headers, policy, resolve), url)

    return McpClient([maker(url, older) for url, older in server.urls], limits)


def from_request(request: McpRequest) -> HttpServer:
    """A request's own server. Raises ``McpError`` for headers or an address that will not do."""
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
    """``host:port`` as vLLM's ``--tool-server`` takes it, or a whole address. Raises ``ConfigError``."""
    try:
        if "://" in entry:
            parse_url(entry)
            return HttpServer(_guesses(entry), trusted=True)
        parsed = parse_url(f"http://{entry}/")
        if parsed.port is None or parsed.path != "/" or parsed.query:
            raise ToolError("a port is missing")
    except ToolError as fault:
        raise ConfigError(
            f"--tool-server {entry}: {fault.message} (demo, host:port, or an address)"
        ) from None
    return HttpServer(((f"http://{entry}/sse", True), (f"http://{entry}/mcp", False)), trusted=True)


def _guesses(url: str) -> tuple[tuple[str, bool], ...]:
    """An address that ends in /sse is the older pair; any other may turn out to be."""
    older = url.split("?")[0].rstrip("/").endswith("/sse")
    return ((url, older), (url, not older))


def read_mcp_config(path: str, environment: Mapping[str, str]) -> dict[str, Server]:
    """The operator's file: ``{"mcpServers": {label: {"command", "args", "env"} or {"url", "headers"}}}``.

    ``${NAME}`` in values is taken from the environment, so that the file holds no secret. Raises
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
        raise ConfigError(f'--mcp-config {path}: an object with "mcpServers" is expected')
    found = {}
    for label, entry in servers.items():
        try:
            found[label] = _entry(label, entry, environment)
        except (ToolError, ValueError) as error:
            raise ConfigError(f"--mcp-config {path}: {label}: {error}") from None
    return found


def _entry(label: str, entry: Any, environment: Mapping[str, str]) -> Server:
    if namespace_name(label) != label:
        raise ValueError("a label has letters, digits, - and _ only, and is none of the built-in names")
    if not isinstance(entry, dict):
        raise ValueError("an object is expected")
    unknown = entry.keys() - {"command", "args", "env", "url", "headers", "type"}
    if unknown or ("command" in entry) == ("url" in entry):
        raise ValueError("either command (with args, env) or url (with headers, type) is expected")
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
            raise ValueError(f"the environment has no {match.group(1)}")
        return environment[match.group(1)]

    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return os.path.expanduser(re.sub(r"\$\{(\w+)\}", replace, value))


def namespace_name(label: str) -> str:
    """The label as a harmony namespace. Raises ``McpError`` when nothing usable is left of it."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", label)[:64]
    if not name.strip("_-") or name.lower() in RESERVED:
        raise McpError(f"{label[:80]!r} cannot be the label of a server")
    return name
