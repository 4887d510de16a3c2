"""A session: one interpreter and its calls, one at a time. Owns the process, its pipes and its termination.

All output is read, so that a program cannot stall; only the first and the last part are kept.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import io
import json
import os
import secrets
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chorale.machine.folders import remove_tree
from chorale.tools.processes import ask, end_process, kill_group
from chorale.tools.python.launch import FILTER_FD, SandboxLaunch
from chorale.tools.python.memory import tree_bytes
from chorale.tools.python.sandbox import Sandbox, SandboxMissing

MAX_CODE_BYTES = 2**20
_GRACE_SECONDS = 1.5  # after a call's time limit, for the guest's timer to end it
_CHUNK = 64 * 1024
_MAX_TOTAL_BYTES = 2**30  # a call that prints more is killed
_WATCH_SECONDS = 0.25
_IDLE_WATCH_SECONDS = 2.0

# C0, DEL and C1, since ESC, CSI etc. would control an operator's terminal, and bidirectional overrides, which
# can disguise text. A carriage return becomes a newline before.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_ESCAPES |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}

EndKind = Literal["done", "raised", "out_of_time", "out_of_memory", "too_loud", "died"]
_LETTERS: dict[bytes, EndKind] = {b"k": "done", b"e": "raised", b"t": "out_of_time"}


@dataclass(frozen=True, slots=True)
class End:
    """The end of a call. ``alive``: whether the variables still exist."""

    kind: EndKind
    alive: bool


class Session:
    def __init__(self, sandbox: Sandbox, container_id: str) -> None:
        self.sandbox = sandbox
        self.container_id = container_id
        self._process: asyncio.subprocess.Process | None = None
        self._directory: str | None = None
        self._launch: SandboxLaunch | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._over_memory = False
        self._closing: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()  # one call at a time, since branches of a conversation share a session

    @property
    def alive(self) -> bool:
        process = self._process
        return self._closing is None and process is not None and process.returncode is None

    async def start(self) -> None:
        """Starts the interpreter. Raises ``SandboxMissing`` with the sandbox's message on failure."""
        if self.sandbox.kind == "dangerously_use_uv":  # other kinds have their files inside
            self._directory = tempfile.mkdtemp(prefix="chorale-python-")
        launch = self._launch = self.sandbox.launch(
            self.container_id.replace("cntr_", "chorale-"), self._directory or ""
        )
        self._process = await _started(launch)
        ends = [item async for item in self._exchange("", launch.start_seconds) if isinstance(item, End)]
        if ends[-1].kind != "done":
            words = await self._last_error()
            await self.close()
            raise SandboxMissing(f"{self.sandbox.kind}: the sandbox cannot be started ({words})")
        if launch.watch_bytes is not None:
            self._watcher = asyncio.create_task(self._watch(launch.watch_bytes))

    async def run(self, code: str) -> AsyncGenerator[str | End, None]:
        """Yields output as it arrives, then one ``End``. Closing the generator early kills the session."""
        finished = False
        try:
            async for item in self._exchange(code, self.sandbox.limits.seconds):
                if isinstance(item, End):
                    finished = True
                    if not item.alive:
                        await self.close()
                yield item
        finally:
            if not finished:
                await self.close()

    # ------------------------------------------------------------------ the exchange

    async def _exchange(self, code: str, seconds: float) -> AsyncGenerator[str | End, None]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            yield End("died", False)
            return
        nonce = secrets.token_hex(16)
        body = code.encode("utf-8", errors="replace")
        header = json.dumps({"nonce": nonce, "length": len(body), "seconds": seconds})
        kept = KeptOutput(self.sandbox.limits.output_bytes, nonce.encode())
        deadline = asyncio.get_running_loop().time() + seconds
        if self._launch is not None and self._launch.own_timer:
            deadline += _GRACE_SECONDS
        kind: EndKind = "died"
        try:
            async with asyncio.timeout_at(deadline):
                process.stdin.write(header.encode() + b"\n" + body)
                await process.stdin.drain()
                while kept.letter is None and kept.num_bytes <= _MAX_TOTAL_BYTES:
                    chunk = await process.stdout.read(_CHUNK)
                    if not chunk:
                        break
                    text = kept.feed(chunk)
                    if text:
                        yield text
            kind = _LETTERS.get(
                kept.letter or b"", "too_loud" if kept.num_bytes > _MAX_TOTAL_BYTES else "died"
            )
        except TimeoutError:
            kind = "out_of_time"
        except (ConnectionError, BrokenPipeError):
            kind = "died"
        rest = kept.finish()
        if rest:
            yield rest
        if kind == "died" and self._over_memory:
            kind = "out_of_memory"
        yield End(kind, kept.letter is not None)

    async def _watch(self, max_bytes: int) -> None:
        """Enforces the host's memory limit over all processes of the session."""
        process = self._process
        while process is not None and process.returncode is None:
            if await asyncio.to_thread(tree_bytes, process.pid) > max_bytes:
                self._over_memory = True
                self._kill()
                return
            await asyncio.sleep(_WATCH_SECONDS if self.lock.locked() else _IDLE_WATCH_SECONDS)

    async def _last_error(self) -> str:
        """Returns the last line of the program's stderr."""
        self._kill()
        stderr = self._process.stderr if self._process is not None else None
        data = b""
        if stderr is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    data = await stderr.read(_CHUNK)
        lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no message"

    # ------------------------------------------------------------------ the end

    def _kill(self) -> None:
        if self._process is not None:
            kill_group(self._process)

    async def close(self) -> None:
        """Ends the session and removes its process, container, pipes and files. Idempotent.

        Continues if the caller is cancelled; a second call waits for the first.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
        process, self._process = self._process, None
        launch, self._launch = self._launch, None
        if process is not None:
            kill_group(process)
            if launch is not None and launch.kill_argv:
                with contextlib.suppress(OSError):
                    await ask(*launch.kill_argv, environment=launch.environment)
            await end_process(process)
        directory, self._directory = self._directory, None
        if directory is not None:
            await asyncio.to_thread(remove_tree, Path(directory))


async def _started(launch: SandboxLaunch) -> asyncio.subprocess.Process:
    filter_fd = None if launch.call_filter is None else _pipe_with(launch.call_filter)
    argv = [str(filter_fd) if argument == FILTER_FD else argument for argument in launch.argv]
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(launch.environment),
            cwd=launch.directory or "/",
            start_new_session=True,  # a separate process group, which is killed as a whole
            limit=_CHUNK,
            pass_fds=() if filter_fd is None else (filter_fd,),
        )
    finally:
        if filter_fd is not None:
            os.close(filter_fd)


def _pipe_with(data: bytes) -> int:
    """Returns the read end of a pipe that contains ``data``."""
    reader, writer = os.pipe()
    with open(writer, "wb") as file:
        file.write(data)
    return reader


class KeptOutput:
    """Decodes output: shows three quarters of the budget immediately, and the last quarter at the end.

    Detects NUL, nonce, letter, NUL, the end of the call, and drops what follows.
    """

    def __init__(self, max_bytes: int, nonce: bytes) -> None:
        self.num_bytes = 0
        self.letter: bytes | None = None
        self._mark = b"\0" + nonce
        self._head_room = max_bytes - max_bytes // 4
        self._tail_len = max_bytes // 4
        self._tail = b""
        self._num_left_out = 0
        self._held = b""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode = io.IncrementalNewlineDecoder(decoder, translate=True).decode

    def feed(self, chunk: bytes) -> str:
        """Adds output. Returns text that can be shown now."""
        self.num_bytes += len(chunk)
        data = self._held + chunk
        mark_start = data.find(self._mark)
        end = mark_start + len(self._mark)
        if mark_start >= 0 and len(data) > end + 1:
            self.letter = data[end : end + 1]
            data, self._held = data[:mark_start], b""
        else:
            cut = mark_start if mark_start >= 0 else self._partial(data)
            data, self._held = data[:cut], data[cut:]
        return self._keep(data)

    def _partial(self, data: bytes) -> int:
        """Returns the position of a possible incomplete end mark."""
        start = data.rfind(b"\0", max(0, len(data) - len(self._mark)))
        return start if start >= 0 and self._mark.startswith(data[start:]) else len(data)

    def _keep(self, data: bytes) -> str:
        head, rest = data[: self._head_room], data[self._head_room :]
        self._head_room -= len(head)
        joined = self._tail + rest
        self._tail = joined[-self._tail_len :] if self._tail_len else b""
        self._num_left_out += len(joined) - len(self._tail)
        return self._text(head)

    def finish(self) -> str:
        """Returns the end of the output, after a note about omitted bytes."""
        held = self._keep(self._held) if self.letter is None else ""
        self._held = b""
        note = ""
        if self._num_left_out:
            note = f"\n[{self._num_left_out} bytes of output left out]\n"
        head = self._text(b"", not self._tail or self._num_left_out > 0)
        return held + head + note + self._text(self._tail, True)

    def _text(self, data: bytes, final: bool = False) -> str:
        return self._decode(data, final).translate(_ESCAPES)
