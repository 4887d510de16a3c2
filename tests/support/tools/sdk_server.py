"""An MCP server written with the official SDK, in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from tests.support import ROOT
from tests.support.ports import free_port

SERVER = ROOT / "tests" / "support" / "tools" / "mcp_sdk_server.py"


@contextlib.asynccontextmanager
async def sdk_server(
    python: str = sys.executable,
    transport: str = "streamable-http",
    name: str = "sample",
    port: int | None = None,
) -> AsyncIterator[int]:
    port = port or free_port()
    process = await asyncio.create_subprocess_exec(
        python,
        str(SERVER),
        transport,
        str(port),
        name,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                break
            assert process.returncode is None, "the SDK's server ended"
            await asyncio.sleep(0.05)
        yield port
    finally:
        process.kill()
        await process.wait()
