"""A supervisor process for the tests to kill: starts an engine process, writes its pid, and waits."""

from __future__ import annotations

import asyncio
import os
import sys

from chorale.serve.bootstrap import EngineStart
from chorale.serve.engine_monitor import EngineMonitor
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import FAKE_ENGINE


async def main(directory: str) -> None:
    behaviour = Behaviour(load_seconds=float(sys.argv[2]))
    start = EngineStart(directory=directory, config=behaviour.encode(), parent_pid=os.getpid())
    state = []
    monitor = EngineMonitor(
        start, command=FAKE_ENGINE, on_status=lambda status, info: state.append(status.state)
    )
    running = asyncio.ensure_future(monitor.run())
    while not state or (behaviour.load_seconds == 0 and "ready" not in state):
        await asyncio.sleep(0.01)
    print(monitor.pid, flush=True)
    await running


asyncio.run(main(sys.argv[1]))
