"""Runs the engine monitors of a server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

import zmq

from chorale.client.wire.messages import Heartbeat, encode, heartbeat_address
from chorale.machine.tasks import end_tasks
from chorale.serve.bootstrap import EngineStart
from chorale.serve.engine_monitor import EngineMonitor

logger = logging.getLogger(__name__)


async def run_engines(monitors: Sequence[EngineMonitor], starts: Sequence[EngineStart]) -> int:
    """Runs all monitors, and returns the exit code of the last one that gives up or is stopped."""
    engines = [asyncio.ensure_future(monitor.run()) for monitor in monitors]
    reports = [
        asyncio.ensure_future(_report_given_up(monitor, running, start))
        for monitor, running, start in zip(monitors, engines, starts, strict=True)
    ]
    try:
        *_, last = [await each for each in asyncio.as_completed(engines)]
    finally:
        await end_tasks(*engines, *reports)
    return last


async def _report_given_up(monitor: EngineMonitor, running: asyncio.Future[int], start: EngineStart) -> None:
    """Sends "failed" heartbeats to all clients once ``running`` (``monitor.run()``) has given up.

    They are repeated, since API processes may connect later. Returns at once if the engine was only stopped.
    """
    await asyncio.wait([running])
    if monitor.failure is None:
        return
    beat = Heartbeat(
        engine_id="",
        pid=os.getpid(),
        state="failed",
        message=monitor.failure.message,
        restarts=monitor.num_restarts,
    )
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(heartbeat_address(start.directory))
        except zmq.ZMQError as error:
            logger.warning(
                "/health will show the failed engine as dead, because its state cannot be published: %s",
                error,
            )
            return
        while True:
            socket.send(encode(beat))
            await asyncio.sleep(start.heartbeat_interval)
