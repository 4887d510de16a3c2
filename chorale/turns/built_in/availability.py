"""Checks that the requested built-in tools are available on this server.

An unavailable tool is a 400 on every endpoint, with one exception: coding agents declare web search and image
generation by default, besides their own tools. Their requests continue without it (logged once) unless
``tool_choice`` requires it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

from chorale.errors import RequestError
from chorale.tools.contract import BuiltInRequest, ToolService
from chorale.turns.rules import TurnRules

logger = logging.getLogger(__name__)

OPTIONAL = frozenset({"web_search", "image_generation"})  # types that agents declare by default


def check_available(service: ToolService | None, asked: BuiltInRequest, rules: TurnRules) -> BuiltInRequest:
    """Returns the available part. Raises ``RequestError`` with code ``tool_not_enabled``."""
    own_tools = bool(rules.functions)  # optional tools may be left out
    named = rules.choice.built_in
    wants_search = named is not None and "web_search" in named
    for kind, path in asked.unserved:
        if not (own_tools and kind in OPTIONAL):
            what = f"tools of type {kind[:64]!r} are not served here"
            raise _refused(path, f"{what}; leave it out, or offer it as a function")
        _log_once(kind)
    asked = replace(asked, unserved=())
    available = service.available if service is not None else {}
    missing = dict(service.missing) if service is not None else {}
    silent = "; ".join(f"--tool-server {entry}: {why}" for entry, why in missing.items() if ":" in entry)
    paths = dict(asked.paths)
    if asked.wanted.web_search is not None and "browser" not in available:
        declared = paths["web_search"].startswith("tools[")  # not requested by another field
        if not own_tools or wants_search or not declared:
            raise _not_enabled(paths["web_search"], "web search", missing.get("browser"), silent)
        _log_once("web_search")
        asked = asked.without_web_search()
    if asked.wanted.code_interpreter is not None and "python" not in available:
        raise _not_enabled(paths["code_interpreter"], "the code interpreter", missing.get("python"), silent)
    for server in asked.wanted.mcp:
        label = server.server_label
        if server.server_url is None and label not in available:
            raise _not_enabled(paths[f"mcp:{label}"], f"the MCP server {label!r}", missing.get(label), silent)
        if server.server_url is not None and "mcp" not in available:
            raise _refused(
                f"{paths[f'mcp:{label}']}.server_url",
                "requests may not name MCP servers by address here (--mcp-requests); name a configured "
                "server by its label",
            )
    return asked


def _not_enabled(path: str, what: str, reason: str | None, silent: str = "") -> RequestError:
    """``silent``: servers of ``--tool-server`` that do not answer, so their tools are unknown."""
    if silent and not reason:
        return _refused(path, f"{what} is not available now: {silent} (retried every few seconds)")
    remedy = "start it with --tool-server demo, or --tool-server HOST:PORT of an MCP server"
    return _refused(path, f"{what} is not enabled on this server; {reason or remedy}")


def _refused(path: str, message: str) -> RequestError:
    return RequestError(f"{path}: {message}", param=path, code="tool_not_enabled")


@cache
def _log_once(name: str) -> None:
    logger.warning("%s is declared by clients, but not enabled: their requests continue without it", name)
