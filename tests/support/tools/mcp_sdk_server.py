"""An MCP server written with the official SDK, version 1.x or 2.x, whichever is installed.

Usage: mcp_sdk_server.py stdio | sse PORT | streamable-http PORT
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

OLD = False
try:
    from mcp.server.mcpserver import Context, MCPServer
except ModuleNotFoundError:
    from mcp.server.fastmcp import Context
    from mcp.server.fastmcp import FastMCP as MCPServer

    OLD = True

NAME = sys.argv[3] if len(sys.argv) > 3 else "sample"
server: Any = MCPServer(NAME, instructions="a sample")


if NAME == "python":  # like the reference server of the python tool

    @server.tool()
    def python(code: str) -> str:
        """Runs nothing."""
        return f"ran {len(code)} characters"

    @server.tool()
    def cleanup_session() -> str:
        """Records the call in the file that an environment variable names."""
        Path(os.environ["CLEANED"]).write_text("yes")
        return "done"


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def fail(reason: str) -> str:
    """Always fails."""
    raise ValueError(reason)


@server.tool()
async def slow(seconds: float, ctx: Context) -> str:
    """Sleeps, with progress."""
    await ctx.report_progress(1, 2, "half")
    await asyncio.sleep(seconds)
    return "slept"


@server.tool()
def big(size: int) -> str:
    """A large text."""
    return "x" * size


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    elif OLD:
        server.settings.port = int(sys.argv[2])
        server.run(sys.argv[1])
    else:
        server.run(sys.argv[1], port=int(sys.argv[2]))
