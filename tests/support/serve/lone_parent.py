"""A supervisor process for the tests to kill: starts an engine process, writes its pid, and waits."""

from __future__ import annotations

import asyncio
import sys

from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import engines


async def main(load_seconds: float) -> None:
    async with engines(1, Behaviour(load_seconds=load_seconds)) as [engine]:
        while not any(load_seconds or status.state == "ready" for status, _ in engine.told):
            await asyncio.sleep(0.01)
        print(engine.pid, flush=True)
        await engine.running


asyncio.run(main(float(sys.argv[1])))
