"""An API process: one of several HTTP processes of a server, which all accept on the same sockets.

Started by the supervisor as ``python -m chorale.serve.http.api_process``, with an ``ApiStart`` on stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

from chorale.api.listening import Stop
from chorale.errors import ChoraleError, ConfigError
from chorale.machine.processes import collect_rarely, settle_signals
from chorale.serve.bootstrap import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    ApiStart,
    inherited_sockets,
    loop_factory,
    read_start,
)
from chorale.serve.http.app import make_client, serve_http
from chorale.serve.logs import configure_logging

logger = logging.getLogger(__name__)
BEAT_SECONDS = 0.5  # interval of heartbeats


async def serve(start: ApiStart) -> None:
    """Serves until SIGTERM, then drains."""
    client, stop = make_client(start), Stop()
    client.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    beating = asyncio.ensure_future(_beat(start.beats))
    try:
        await serve_http(client, start, inherited_sockets(start.socket_fds), stop)
    finally:
        beating.cancel()
        await client.close()


async def _beat(descriptor: int) -> None:
    """Writes heartbeats for the supervisor. They stop if the event loop is blocked."""
    os.set_blocking(descriptor, False)
    while True:
        with contextlib.suppress(BlockingIOError):  # the supervisor is suspended, and the pipe is full
            os.write(descriptor, b".")
        await asyncio.sleep(BEAT_SECONDS)


def main() -> int:
    collect_rarely()
    start = read_start(sys.stdin.buffer, ApiStart)
    configure_logging(start.log, f"api-{start.process}")
    settle_signals((signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))  # the supervisor handles these
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(start))
    except ChoraleError as error:
        logger.error("%s", error)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
