"""A child process with the API classes of one test case, bounded in memory and time, which ends with us."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from chorale.evaluation.tasks.bfcl.entries import Entry
from chorale.evaluation.tasks.bfcl.source import BfclFiles
from chorale.tools.processes import end_process

MEMORY_BYTES = 2**30
CALL_SECONDS = 20.0  # of a request: all calls of one step
START_SECONDS = 60.0
_MAX_LINE = 64 * 2**20
_HOST = Path(__file__).with_name("api_host.py")


class ApiFault(Exception):
    """The process has ended, or did not answer in time, or refused the request."""


class ApiProcess:
    """Calls API classes. Made by ``open_apis``, which ends it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def call(self, side: str, calls: Sequence[str]) -> list[str]:
        """Returns the results of calls on the instances of ``side``, which its first call makes."""
        results: list[str] = await self._ask({"do": "call", "side": side, "calls": list(calls)})
        return results

    async def compare(self, side: str, other: str) -> dict[str, Any]:
        """Returns the first class whose state differs, with its differences; empty if none does."""
        found: dict[str, Any] = await self._ask({"do": "compare", "side": side, "other": other})
        return found

    async def _ask(self, request: dict[str, Any], seconds: float | None = None) -> Any:
        limit = CALL_SECONDS if seconds is None else seconds
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ApiFault("the process of the API classes has no pipes")
        try:
            async with asyncio.timeout(limit):
                stdin.write(json.dumps(request).encode() + b"\n")
                await stdin.drain()
                line = await stdout.readline()
        except TimeoutError:
            await end_process(self._process)
            raise ApiFault(f"no answer within {limit:g} s") from None
        except (ConnectionError, ValueError) as fault:  # ValueError: a line beyond the limit
            raise ApiFault(f"the process of the API classes failed ({fault})") from None
        if not line.endswith(b"\n"):
            raise ApiFault("the process of the API classes has ended")
        answer = json.loads(line)
        if "fault" in answer:
            raise ApiFault(answer["fault"])
        return answer["ok"]


@contextlib.asynccontextmanager
async def open_apis(files: BfclFiles, entry: Entry) -> AsyncIterator[ApiProcess]:
    """Starts a process with the classes of a test case. Raises ``ApiFault`` if they cannot be loaded."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-B", str(_HOST)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"LANG": "C.UTF-8"},
        start_new_session=True,
        limit=_MAX_LINE,
    )
    try:
        apis = ApiProcess(process)
        await apis._ask(_start(files, entry), START_SECONDS)
        yield apis
    finally:
        await end_process(process)


def _start(files: BfclFiles, entry: Entry) -> dict[str, Any]:
    root = str(Path(__file__).resolve().parents[4])
    return {
        "parent_pid": os.getpid(),
        "path": [root, *(place for place in sys.path if os.path.isabs(place) and place != root)],
        "import_path": files.import_path,
        "memory_bytes": MEMORY_BYTES,
        "id": entry.id,
        "classes": {name: files.module(name) for name in entry.classes},
        "initial": entry.initial,
        "long_context": entry.long_context,
    }
