"""Probe: a deployment that routes requests as a front does, and measures it (``ray_fleet.py``)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from chorale.client.fleet import FleetClient
from chorale.client.members import Ticket
from chorale.engine.types import GenerateRequest
from chorale.ray.assigner import ASSIGNERS, RayAssigner


class Probe:
    async def __init__(self, engine: Any) -> None:
        self._assigner = RayAssigner(engine)
        self._fleet = self._assigner.fleet = FleetClient(self._assigner)
        ASSIGNERS[engine.app_name, engine.deployment_name] = self._assigner
        self._assigner.start()
        self._fleet.start()
        engine._init(_run_router_in_separate_loop=False)
        while self._fleet.status.state != "ready":
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)

    async def measure(self, num_tokens: int, count: int, at_once: int) -> dict[str, float]:
        prompt = [number % 5000 for number in range(num_tokens)]
        requests = [
            GenerateRequest(request_id=f"{num_tokens}-{at_once}-{number}", prompt_token_ids=prompt)
            for number in range(count)
        ]
        started = time.process_time()
        tickets: list[Ticket] = [await self._fleet._looked_up(request) for request in requests]
        for ticket in tickets:
            self._fleet.rank(ticket, self._fleet.members.by_name)
        ranked = time.process_time()

        async def assign(part: list[Ticket]) -> None:
            for ticket in part:
                await self._assigner.assign(ticket)
                self._assigner.ended(ticket)

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(assign(tickets[place::at_once]) for place in range(at_once)))
        elapsed, used = time.perf_counter() - began, time.process_time() - cpu
        scale = 1e6 / count
        return {"rank": (ranked - started) * scale, "assign": used * scale, "wall": elapsed * scale}
