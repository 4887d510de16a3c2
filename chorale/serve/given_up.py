"""Heartbeats in place of an engine that was given up, so that every HTTP process shows it as failed."""

from __future__ import annotations

import asyncio
import logging
import os

import zmq

from chorale.client.wire.messages import Heartbeat, encode, heartbeat_address
from chorale.serve.bootstrap import EngineStart
from chorale.serve.engine_monitor import EngineMonitor

logger = logging.getLogger(__name__)


async def report_given_up(monitor: EngineMonitor, running: asyncio.Future[int], start: EngineStart) -> None:
    """Waits for the end of ``running`` (``monitor.run()``), then sends "failed" until cancelled.

    It is repeated, since API processes may start or connect later. Returns if the engine was only stopped.
    """
    await asyncio.wait([running])
    if monitor.failure is None:
        return
    beat = Heartbeat(engine_id="", pid=os.getpid(), state="failed", message=monitor.failure.message)
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(heartbeat_address(start.directory))
        except zmq.ZMQError as error:
            logger.warning("/health shows an engine that was given up as dead: %s", error)
            return
        while True:
            socket.send(encode(beat))
            await asyncio.sleep(start.heartbeat_interval)
