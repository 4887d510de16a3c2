"""``chorale tools``: the built-in tools without a model.

``serve`` runs one tool as an MCP server, for other engines' ``--tool-server``. ``check`` reports which tools
work on this machine and what the others need.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from chorale.config.engine import ToolConfig
from chorale.config.options.configs import targets, tool_config
from chorale.config.options.flags import TOOL_FLAGS
from chorale.config.options.help import wants_help
from chorale.config.options.parse import read_arguments
from chorale.config.options.settings import OPEN_ADDRESSES
from chorale.config.options.values import Setting
from chorale.config.suggestions import nearest, subcommand
from chorale.errors import ConfigError

USAGE = """\
usage: chorale tools serve {browser,python} [--host 127.0.0.1] [--port 8001]
       chorale tools check

serve  run one tool as an MCP server (streamable HTTP at /mcp).
       Clients must send the token in CHORALE_TOOLS_API_KEY, if it is set.
       In other engines: --tool-server localhost:8001
check  report which tools work here, with a remedy for those that do not

Both accept the options of chorale serve --help=tools (--browser-tool, ...)."""
DEFAULT_PORT = 8001


def run(arguments: list[str]) -> int:
    if not arguments or wants_help(arguments):
        print(USAGE)
        return 0 if arguments else 2
    positionals, values = read_arguments(arguments)
    known = {flag.name for flag in TOOL_FLAGS} | {"host", "port"}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ConfigError(f"chorale tools has no option --{unknown[0]}{nearest(unknown[0], known, '--')}")
    config = _config(values)
    if positionals == ["check"]:
        return check(config)
    if len(positionals) == 2 and positionals[0] == "serve" and positionals[1] in ("browser", "python"):
        host, port = str(values.get("host", "127.0.0.1")), int(values.get("port", DEFAULT_PORT))
        return serve(positionals[1], config, host, port)
    say = "use: chorale tools serve browser, chorale tools serve python, or chorale tools check"
    if positionals and positionals[0] not in ("serve", "check"):
        raise subcommand(positionals[0], ("serve", "check"), "tools command", say)
    if positionals[:1] == ["serve"] and len(positionals) == 2:
        raise subcommand(positionals[1], ("browser", "python"), "tool", say)
    raise ConfigError(say)


def _config(values: Mapping[str, Any]) -> ToolConfig:
    """Returns the tools' configuration.

    Raises ``ConfigError`` for numbers out of bounds, the port's included.
    """
    return tool_config(
        targets({name: Setting(value, "command line") for name, value in values.items()})["tools"]
    )


def check(config: ToolConfig) -> int:
    """Tests the requested tools, or all of them. Returns exit code 1 if one is not available."""
    from chorale.tools.service import probe_tools

    if config == ToolConfig():
        config = ToolConfig(servers=("demo",))
    found = asyncio.run(probe_tools(config, os.environ, patient=True))
    for name, what in found.available.items():
        print(f"OK    {name:<10} {what}")
    for name, reason in found.missing.items():
        print(f"FIX   {name:<10} {reason}")
    return 1 if found.missing else 0


def serve(name: str, config: ToolConfig, host: str, port: int) -> int:
    """Serves one tool until interrupted."""
    from chorale.tools.mcp_server.run import serve_tool

    key = os.environ.get("CHORALE_TOOLS_API_KEY") or None
    if host in OPEN_ADDRESSES and key is None:
        print("note: listening on all interfaces without CHORALE_TOOLS_API_KEY: anyone can use it")
    if name == "browser":
        config = replace(config, python="none", browser=config.browser or "auto")
    else:
        config = replace(config, browser="none", python=config.python or "auto")
    config = replace(config, servers=(), mcp_config=None, mcp_requests=False)
    return asyncio.run(
        serve_tool(cast(Any, name), config, os.environ, host=host, port=port, key=key, say=print)
    )
