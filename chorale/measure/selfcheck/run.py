"""Runs the checks: of the device in a child process, of the server over HTTP, each with a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx2

from chorale.config.engine import EngineConfig
from chorale.errors import ChoraleError
from chorale.measure.selfcheck.check import Check, Failed, Found, Outcome, Stage, outcome_of
from chorale.measure.selfcheck.child import device_outcomes
from chorale.measure.selfcheck.serving.server import Context, Server, ServerCheck
from chorale.requests.openai_client import AsyncClient, Client, Endpoint
from chorale.serve.private_server import PrivateProcess, private_process, wait_until_healthy

_START_SECONDS = 1200.0

Report = Callable[[Check | Outcome], None]


@dataclass(frozen=True, slots=True)
class Plan:
    checks: Sequence[Check]
    config: EngineConfig
    serve_arguments: Sequence[str]
    context: Context
    api_key: str | None = field(default=None, repr=False)
    tls: bool = False


def run_checks(plan: Plan, report: Report) -> list[Outcome]:
    """Runs all checks of the plan. ``report`` gets each check when it begins, then its outcome."""
    outcomes: list[Outcome] = []

    def note(message: Check | Outcome) -> None:
        if isinstance(message, Outcome):
            outcomes.append(message)
        report(message)

    def run_device(*stages: Stage) -> None:
        checks = [check for check in plan.checks if check.stage in stages]
        context = plan.context
        for message in device_outcomes(checks, plan.config, context.recording, quick=context.quick):
            note(message)

    run_device("files", "device")
    if checks := [check for check in plan.checks if check.stage == "server"]:
        asyncio.run(_run_server(plan, checks, note))
    run_device("after")
    return outcomes


async def _run_server(plan: Plan, checks: list[Check], note: Report) -> None:
    """Starts a server (the check "start"), then runs the other checks, or skips them if it did not start."""
    start, *rest = checks
    note(start)
    begin = time.perf_counter()
    try:
        with private_process(plan.serve_arguments) as started:
            scheme = "https" if plan.tls else "http"
            endpoint = Endpoint(f"{scheme}://localhost/v1", plan.api_key, started.socket)
            await asyncio.to_thread(_wait, endpoint, started)
            # Each check has its own time limit.
            async with AsyncClient(endpoint, seconds=None) as client:
                server = Server(started, client)
                detail = await _learn(server)
                note(outcome_of("start", Found(detail), begin))
                for check in rest:
                    note(check)
                    note(await run_one(check, check.function, server, plan.context))
    except (Failed, ChoraleError) as error:
        note(outcome_of("start", error, begin))
        for check in rest:
            note(Outcome(check.name, "skipped", "there is no server", 0.0))


def _wait(endpoint: Endpoint, started: PrivateProcess) -> None:
    with Client(endpoint) as client:
        wait_until_healthy(client, started, _START_SECONDS)


async def _learn(server: Server) -> str:
    try:
        return await server.learn()
    except (httpx2.HTTPError, KeyError, IndexError, ValueError) as error:
        raise Failed(f"it started, but its model and sizes cannot be read: {error}") from None


async def run_one(check: Check, function: ServerCheck, server: Server, context: Context) -> Outcome:
    """Runs one check of a server with its time limit. Any exception becomes its outcome."""
    begin = time.perf_counter()
    try:
        async with asyncio.timeout(check.seconds):
            return outcome_of(check.name, await function(server, context), begin)
    except TimeoutError:
        fault = Failed(f"took longer than {check.seconds:.0f} s; {server.log_tail()}")
        return outcome_of(check.name, fault, begin)
    except Exception as error:
        return outcome_of(check.name, error, begin)
