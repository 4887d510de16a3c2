"""BatchJob: the lines of ``chorale run-batch`` as the supervisor's job, and its port for metrics."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from chorale.config.engine import ServerConfig
from chorale.errors import ChoraleError, NotFoundError
from chorale.jobs.execute import AppSender
from chorale.serve.http.server import listening

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from chorale.api.http.middleware import HttpMiddleware
    from chorale.cli.commands.serve.batch_screen import LineProgress
    from chorale.jobs.run_file import FileRun

OPEN = ("/metrics", "/health")


class BatchJob:
    """Runs the lines on the app of this process. ``failure``: the error that ended it."""

    def __init__(
        self,
        file_run: FileRun,
        progress: LineProgress,
        config: ServerConfig,
        sockets: list[socket.socket],
        concurrency: int | None,
    ) -> None:
        self._run, self._progress, self._config = file_run, progress, config
        self._sockets, self._concurrency = sockets, concurrency
        self._started = False
        self.failure: ChoraleError | None = None

    async def run(self, app: HttpMiddleware) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if self._sockets:
                await stack.enter_async_context(listening(metrics_only(app), self._config, self._sockets))
            # As many again wait in the engine, so that it never waits for a line.
            running = app.state.client.info.max_num_seqs * self._config.data_parallel_size
            self._started = True
            self._progress.start()
            try:
                await self._run.run(AppSender(app), self._concurrency or 2 * running)
            except ChoraleError as error:
                self.failure = error

    def stop(self) -> None:
        if self._started and not self._run.complete:
            self._progress.note("stopping: waiting for lines in flight (interrupt again to cancel them)")
        self._run.stop()


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
