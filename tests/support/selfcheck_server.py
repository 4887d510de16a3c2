"""A function in place of the self-check's server, and the outcome of one check against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from chorale.config.engine import EngineConfig
from chorale.measure.selfcheck.check import Check, Outcome, Plan
from chorale.measure.selfcheck.run import run_one
from chorale.measure.selfcheck.serving.server import Server, ServerCheck
from chorale.requests.openai_client import AsyncClient, Endpoint
from chorale.serve.private_server import PrivateProcess

Answer = Callable[[str, dict[str, Any]], Any]  # (path, body) -> the JSON of a response, or a response


def outcome(
    check: ServerCheck, answer: Answer, process: Any, tmp_path: Path, seconds: float = 20.0
) -> Outcome:
    """Runs a check against a server without sockets."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        found = answer(request.url.path, json.loads(request.content) if request.content else {})
        return found if isinstance(found, httpx2.Response) else httpx2.Response(200, json=found)

    async def run() -> Outcome:
        (tmp_path / "log").write_text("the last line")
        transport = httpx2.MockTransport(handle)
        async with AsyncClient(Endpoint("http://s/v1"), transport=transport) as client:
            started = PrivateProcess(process, tmp_path, tmp_path / "log")
            server = Server(Plan([], EngineConfig(), quick=True), started, client, "m", 4096)
            return await run_one(Check("stops", "server", "", seconds, ""), check, server)

    return asyncio.run(run())
