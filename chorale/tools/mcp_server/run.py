"""Runs a tool server: starts the tool, listens, and ends on a signal."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping

import uvicorn

from chorale.config.engine import ToolConfig
from chorale.errors import ConfigError
from chorale.harmony.vocab import load_vocabulary
from chorale.tools.mcp_server.app import create_app
from chorale.tools.mcp_server.server import ServerName, ToolServer
from chorale.tools.service import start_tools


async def serve_tool(
    name: ServerName,
    config: ToolConfig,
    environment: Mapping[str, str],
    *,
    host: str,
    port: int,
    key: str | None,
    say: Callable[[str], None],
) -> int:
    """Runs the server and returns an exit code. Raises ``ConfigError`` for an unavailable tool or port."""
    vocab = await asyncio.to_thread(load_vocabulary)
    service = await start_tools(config, environment, lambda text: len(vocab.encode(text)))
    try:
        if name not in service.available:
            raise ConfigError(f"{name}: {service.missing.get(name, 'not enabled')}")
        listening = _listen(host, port)
        server = ToolServer(name, service)
        app = create_app(server, host=host, key=key)
        say(f"{name}: {service.available[name]}")
        say(f"listening at http://{host}:{listening.getsockname()[1]}/mcp")
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5
        )
        await uvicorn.Server(settings).serve(sockets=[listening])
        await server.aclose()
        return 0
    finally:
        await service.aclose()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
