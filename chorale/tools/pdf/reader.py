"""Starts the processes that read PDF files, and turns what they report into text or an error."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal

from chorale.errors import QueueFullError, RequestError, install_hint
from chorale.machine.processes import module_command
from chorale.tools.pdf.child import LIMITS, Limits
from chorale.tools.processes import end_process

MAX_BYTES = 10 * 2**20
MAX_FILES = 8  # of a request
MAX_SECONDS = 60.0  # with waits for a processor; the process itself may use Limits.cpu_seconds of it
_PROCESSES = 2
_MAX_WAITING = 32
_TOO_LONG = (-signal.SIGXCPU, -signal.SIGKILL)  # the system's answers to too much time and too much memory


class PdfReader:
    """Reads PDF files, at most two at once: each takes a processor and memory for seconds."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._turns = asyncio.Semaphore(_PROCESSES)
        self._num_waiting = 0

    async def text(self, data: bytes, param: str) -> str:
        """Returns the text of a PDF file. Raises ``RequestError`` that names ``param``."""
        if importlib.util.find_spec("pypdf") is None:
            raise _refused(param, f"this server has no reader of PDF files: {install_hint('pdf')}")
        if len(data) > MAX_BYTES:
            raise _refused(param, f"the PDF file has more than {MAX_BYTES} bytes")
        if self._num_waiting >= _MAX_WAITING:
            raise QueueFullError("too many PDF files wait to be read", param=param, retry_after=10.0)
        self._num_waiting += 1
        try:
            async with self._turns:
                report = await self._read(data)
        finally:
            self._num_waiting -= 1
        if "text" not in report:
            raise _refused(param, report["error"])
        return report["text"]

    async def _read(self, data: bytes) -> dict[str, str]:
        process = await asyncio.create_subprocess_exec(
            *module_command("chorale.tools.pdf.child"), json.dumps([os.getpid(), self._limits]),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={}, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(MAX_SECONDS):
                output, _ = await process.communicate(data)
        except TimeoutError:
            return {"error": "the PDF file takes too long to read"}
        finally:
            await end_process(process)
        if process.returncode in _TOO_LONG:
            return {"error": "the PDF file takes too long, or too much memory, to read"}
        try:
            return dict(json.loads(output))
        except ValueError:
            return {"error": "the PDF file cannot be read"}


def _refused(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_file")
