"""The self-test of a sandbox: an interpreter works in it, and the guarantees of docs/reference/tools.md hold.

It runs once before a kind is used. Its attempts change nothing even if they succeed: files get unique names
and are removed, and settings are only tested for access.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

from chorale.tools.python.sandbox import Sandbox, SandboxMissing
from chorale.tools.python.session import End, Session

_ORDINARY_NAMES = {"HOME", "PATH", "LANG", "LC_ALL", "LC_CTYPE", "PWD", "HOSTNAME", "TERM", "SHLVL", "OLDPWD"}
_PROOF = Path(__file__).with_name("proof_inside.py")


async def prove(sandbox: Sandbox) -> None:
    """Runs the self-test. Raises ``SandboxMissing`` with the guarantees that do not hold."""
    session = Session(sandbox, f"cntr_{secrets.token_hex(24)}")
    try:
        await session.start()
        if await _output(session, "6 * 7") != "42\n":
            raise SandboxMissing(f"{sandbox.kind}: the interpreter does not work")
        if sandbox.kind == "dangerously_use_uv":
            return  # no guarantees
        with _secret_file() as secret:
            async with _listening() as port:
                facts = _facts(sandbox, secret, port)
                output = await _output(session, f"FACTS = {facts!r}\n{_PROOF.read_text('utf-8')}")
    finally:
        await session.close()
    _judge(sandbox, output)


def _facts(sandbox: Sandbox, secret: str, port: int) -> dict[str, Any]:
    """Returns the facts about the server that the attempts need."""
    return {
        "secret_file": secret,
        "port": None if sandbox.limits.network else port,
        "names": sorted(os.environ.keys() - _ORDINARY_NAMES),
        "pid": os.getpid(),
        "disk_bytes": sandbox.limits.disk_bytes,
        "call_filter": sandbox.kind == "bubblewrap",
        "unique": f"chorale-{secrets.token_hex(8)}",
    }


def _judge(sandbox: Sandbox, output: str) -> None:
    lines = output.strip().splitlines()
    try:
        broken = json.loads(lines[-1])["broken"]
    except (IndexError, ValueError, KeyError, TypeError):
        words = lines[-1][:200] if lines else "no output"
        raise SandboxMissing(f"{sandbox.kind}: the self-test did not finish ({words})") from None
    if broken:
        raise SandboxMissing(
            f"{sandbox.kind}: refused, since the sandbox is not secure here: {'; '.join(broken)}"
        )


async def _output(session: Session, code: str) -> str:
    parts = []
    async for item in session.run(code):
        if isinstance(item, End) and item.kind != "done":
            parts.append(f"\n{item.kind}")
        elif isinstance(item, str):
            parts.append(item)
    return "".join(parts)


@contextlib.contextmanager
def _secret_file() -> Iterator[str]:
    """Creates a file that every user of this machine can read."""
    fd, name = tempfile.mkstemp(prefix="chorale-proof-")
    try:
        os.write(fd, b"secret")
        os.fchmod(fd, 0o644)
        os.close(fd)
        yield name
    finally:
        os.unlink(name)


@contextlib.asynccontextmanager
async def _listening() -> AsyncGenerator[int, None]:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
