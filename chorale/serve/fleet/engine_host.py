"""EngineHost: runs an engine for clients on other machines, and restarts it if it crashes or hangs.

This process owns the listening sockets, which each engine process inherits, so that the address stays the
same after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence

from chorale.client.wire.curve import TcpSocket, new_keys
from chorale.client.wire.messages import EngineAddress
from chorale.config.engine import EngineConfig
from chorale.serve.bootstrap import EngineStart, EngineTcp, Failure, loop_factory, make_directory
from chorale.serve.engine_monitor import ENGINE_COMMAND, EngineMonitor
from chorale.serve.logs import LogOptions
from chorale.serve.watch import WatchLimits

logger = logging.getLogger(__name__)
STOP_SLACK = 2.0  # seconds added to the kill grace of the engine
BACKLOG = 1024


class EngineHost:
    """``host``: the address of this machine for clients. Call ``start`` once, and ``stop`` at the end."""

    def __init__(
        self,
        config: EngineConfig,
        host: str,
        *,
        prefix_secret: bytes = b"",
        log: LogOptions | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._limits = WatchLimits()
        self._folder = make_directory()
        self._sockets = [_listening(host), _listening(host)]
        public_key, self.secret_key = new_keys()
        engine, beats = (TcpSocket(each.fileno(), self.secret_key) for each in self._sockets)
        start = EngineStart(
            directory=str(self._folder.path),
            config=config,
            parent_pid=os.getpid(),
            prefix_secret=prefix_secret,
            log=log or LogOptions(),
            tcp=EngineTcp(engine=engine, beats=beats, public_key=public_key),
        )
        self.monitor = EngineMonitor(start, command=command, limits=self._limits)
        self.local_address = start.address  # for clients on this machine
        shown = f"[{host}]" if ":" in host else host
        at, beats_at = (f"tcp://{shown}:{each.getsockname()[1]}" for each in self._sockets)
        self.address = EngineAddress(at, beats_at, public_key)
        self._fault: Failure | None = None  # error that ended the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = threading.Event()
        # The thread must live on: an engine process ends with the thread that started it.
        self._thread = threading.Thread(target=self._run, name="engine-host", daemon=True)

    @property
    def failure(self) -> Failure | None:
        """Returns the reason why the engine will not be restarted, or None."""
        return self._fault or self.monitor.failure

    def start(self) -> None:
        self._thread.start()
        self._is_up.wait()

    def _run(self) -> None:
        # Use uvloop if it is installed: under its policy, asyncio's loops have no child watcher.
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._keep())
        except Exception as error:
            logger.exception("the engine monitor failed; the engine is no longer monitored")
            self._fault = Failure(f"the engine's host failed ({type(error).__name__})", deterministic=False)
        finally:
            self._is_up.set()

    async def _keep(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_up.set()
        await self.monitor.run()

    def stop(self) -> None:
        """Stop the engine process, which may finish its requests within the grace, and remove its files."""
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the thread has just ended and closed its loop
                self._loop.call_soon_threadsafe(self.monitor.stop)
            self._thread.join(self._limits.kill_grace + STOP_SLACK)
        for each in self._sockets:
            each.close()
        self._folder.remove()


def _listening(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.bind((host, 0))
    made.listen(BACKLOG)
    made.setblocking(False)
    made.set_inheritable(True)
    return made
