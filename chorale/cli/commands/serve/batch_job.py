"""Sends the lines of ``chorale run-batch``: to a server, or to the app of this process (``EngineJob``)."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from chorale.config.engine import ServerConfig
from chorale.errors import ChoraleError, NotFoundError
from chorale.jobs.execute import AppSender, Sender
from chorale.serve.http.server import listening

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from chorale.api.http.middleware import HttpMiddleware
    from chorale.cli.commands.serve.batch_screen import LineProgress
    from chorale.jobs.run_file import FileWork, Journal

OPEN = ("/metrics", "/health")


class BatchJob:
    """Sends the lines that have no record."""

    def __init__(self, journal: Journal, progress: LineProgress, concurrency: int | None) -> None:
        self._journal, self._progress, self._concurrency = journal, progress, concurrency
        self._work: FileWork | None = None
        self._stopped = False

    async def send(self, send: Sender, default_concurrency: int) -> None:
        """Sends the lines and waits for them, after ``stop`` only for those in flight."""
        if self._stopped:
            return
        self._work = self._journal.work(send, self._concurrency or default_concurrency, self._progress.add)
        self._progress.start()
        try:
            await self._work.run()
        finally:
            self._work = None

    def stop(self) -> None:
        """Stops sending lines. A second call aborts the lines in flight."""
        self._stopped = True
        if self._work is not None:
            self._progress.note("stopping: waiting for lines in flight (interrupt again to cancel them)")
            self._work.interrupt()


class EngineJob(BatchJob):
    """Runs under the supervisor. ``failure``: the error that ended it. ``sockets``: serve the metrics."""

    def __init__(
        self,
        journal: Journal,
        progress: LineProgress,
        concurrency: int | None,
        config: ServerConfig,
        sockets: list[socket.socket],
    ) -> None:
        super().__init__(journal, progress, concurrency)
        self._config, self._sockets = config, sockets
        self.failure: ChoraleError | None = None

    async def run(self, app: HttpMiddleware) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if self._sockets:
                await stack.enter_async_context(listening(metrics_only(app), self._config, self._sockets))
            # Twice the lines that can run, so that the engine always has queued lines.
            running = app.state.client.info.max_num_seqs * self._config.data_parallel_size
            try:
                await self.send(AppSender(app), 2 * running)
            except ChoraleError as error:
                self.failure = error


def metrics_only(app: ASGIApp) -> ASGIApp:
    """Returns an app that has only the paths for monitoring."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            from chorale.api.http.responses import error_response

            missing = error_response(
                NotFoundError(f"only {' and '.join(OPEN)} are served", code="unknown_url")
            )
            await missing(scope, receive, send)
        elif scope["type"] == "http":
            await app(scope, receive, send)

    return answer
