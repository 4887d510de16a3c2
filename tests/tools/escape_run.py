"""Runs the attempts of ``escapes`` against one kind of sandbox and says how each ended.

Also a program, so that the same can be done as another user: ``python -m tests.tools.escape_run KIND``.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from chorale.tools.python.launch import SandboxLimits
from chorale.tools.python.sandbox import Sandbox, SandboxKind
from chorale.tools.python.tool import PythonTool, SessionPool, new_container_id
from tests.support.tools.drive import drive
from tests.tools.escapes import FORBIDDEN, GREEDY, filled

LIMITS = SandboxLimits(
    seconds=20, memory_bytes=192 * 2**20, num_processes=32, disk_bytes=8 * 2**20, output_bytes=4000
)
QUICK = SandboxLimits(
    seconds=0.5, memory_bytes=192 * 2**20, num_processes=32, disk_bytes=8 * 2**20, output_bytes=4000
)
SLACK_BYTES = 64 * 2**20  # of the machine's shared memory, for other work beside the test
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_ERROR = re.compile(r"^(?:\w+\.)*(\w*(?:[Ee]rror|Exit|Interrupt|Operation))\b.*$", re.MULTILINE)


@contextmanager
def the_server_side() -> Iterator[dict[str, str]]:
    """A file, an environment variable and sockets that the attempts look for."""
    value, unique = "secret-" + secrets.token_hex(8), "chorale-try-" + secrets.token_hex(8)
    fd, path = tempfile.mkstemp(prefix="chorale-try-")
    os.write(fd, value.encode())
    os.fchmod(fd, 0o644)
    os.close(fd)
    os.environ["CHORALE_TRY"] = value
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as tcp,
        closing(_six()) as six,
        closing(_udp(tcp)) as udp,
    ):
        local = socket.socket(socket.AF_UNIX)
        local.bind("\0" + unique)
        local.listen()
        try:
            yield {
                "SECRET": path,
                "PROJECT": str(Path(__file__).resolve().parents[2]),
                "PID": str(os.getpid()),
                "VALUE": value[::-1],
                "UNIQUE": unique,
                "OTHER": "other-" + unique,
                "PORT": str(tcp.getsockname()[1]),
                "PORT6": str(six.getsockname()[1]),
            }
        finally:
            local.close()
            udp.close()
            os.unlink(path)
            del os.environ["CHORALE_TRY"]


def _six() -> socket.socket:
    try:
        return socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        return socket.create_server(("127.0.0.1", 0))  # a machine without IPv6


def _udp(tcp: socket.socket) -> socket.socket:
    """Answers whatever comes, from a thread of its own that ends with the socket."""
    import threading

    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(tcp.getsockname())

    def answer() -> None:
        try:
            while True:
                _, whom = udp.recvfrom(16)
                udp.sendto(b"y", whom)
        except OSError:
            pass

    threading.Thread(target=answer, daemon=True).start()
    return udp


async def forbidden(kind: SandboxKind, names: tuple[str, ...] = tuple(FORBIDDEN)) -> dict[str, str]:
    """How each attempt ended: "held: ..." or "ESCAPED ..."."""
    outcomes = {}
    with the_server_side() as facts:
        pool = SessionPool(Sandbox(kind, LIMITS))
        try:
            await drive(
                PythonTool(pool, new_container_id()).call,
                "python",
                f"open('/mnt/data/{facts['OTHER']}', 'w')",
            )
            tool = PythonTool(pool, new_container_id())
            for name in names:
                _, result = await drive(tool.call, "python", filled(FORBIDDEN[name], facts))
                outcomes[name] = _judged(result.content, facts["VALUE"][::-1])
        finally:
            await pool.aclose()
    return outcomes


def _judged(content: str, value: str) -> str:
    if "ESCAPED" in content or value in content or _CONTROLS.search(content):
        return "ESCAPED: " + content[:300]
    found = _ERROR.findall(content)
    return f"held: {found[-1]}" if found else "UNCLEAR: " + content[-300:]


async def greedy(kind: SandboxKind, names: tuple[str, ...] = tuple(GREEDY)) -> dict[str, str]:
    """Each in a fresh session; the machine's shared memory and the next call are looked at too."""
    left, outcomes = list(names), {}

    async def in_one_pool() -> None:
        """Goes on until a session outlives its attempt: after the others, the next call had a fresh one."""
        pool = SessionPool(Sandbox(kind, QUICK))
        tool, is_fresh = PythonTool(pool, new_container_id()), True
        try:
            await drive(tool.call, "python", "0")
            while left and is_fresh:
                name = left.pop(0)
                outcomes[name], is_fresh = await _one_greedy(tool, filled(GREEDY[name], {}))
        finally:
            await pool.aclose()

    async def work() -> None:
        while left:
            await in_one_pool()

    await asyncio.gather(*(work() for _ in range(4)))
    return outcomes


async def _one_greedy(tool: PythonTool, code: str) -> tuple[str, bool]:
    """Returns how it ended, and whether the next call had a new session."""
    loop = asyncio.get_running_loop()
    start, before = loop.time(), shared_bytes()
    _, result = await drive(tool.call, "python", code)
    seconds, grown = loop.time() - start, shared_bytes() - before
    for _ in range(2):  # a forged end lets the call go on: the next one then ends the session
        _, after = await drive(tool.call, "python", "6 * 7")
        if after.content.endswith("42\n"):
            break
    is_fresh = after.content.startswith("[a new session")
    return _bounded(result.content, after.content, seconds, grown), is_fresh


def _bounded(content: str, after: str, seconds: float, grown: int) -> str:
    if "ESCAPED" in content or _CONTROLS.search(content):
        return "ESCAPED: " + content[:300]
    if seconds > 15 or grown > SLACK_BYTES or len(content) > 17_000:
        return f"ESCAPED: {seconds:.1f} s, {grown} bytes, {len(content)} characters"
    if not after.endswith("42\n"):
        return "ESCAPED: the next call is broken: " + after[:300]
    note = re.findall(r"^\[((?!a new).*?)\]", content, re.MULTILINE)
    found = _ERROR.findall(content)
    return "held: " + (note[-1] if note else found[-1] if found else "ended")


def shared_bytes() -> int:
    """tmpfs and shared memory of the whole machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


MEMORY = tuple(name for name in GREEDY if "memory" in name or "tmpfs" in name)
_RUNS: dict[str, Callable[[Any], Coroutine[Any, Any, dict[str, str]]]] = {
    "forbidden": forbidden,
    "greedy": greedy,
    "memory": functools.partial(greedy, names=MEMORY),
}


def main() -> None:
    kind, which = sys.argv[1], sys.argv[2:] or ["forbidden", "greedy"]
    outcomes: dict[str, str] = {}
    for name in which:
        outcomes |= asyncio.run(_RUNS[name](kind))
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
