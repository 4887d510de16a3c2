"""Runs the checks: of the device in a child process, of the server over HTTP, each with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Iterator, Sequence

from chorale.errors import ChoraleError
from chorale.measure.selfcheck.check import Check, Failed, Found, Outcome, Plan, outcome_of
from chorale.measure.selfcheck.child import device_outcomes
from chorale.measure.selfcheck.serving.server import Server, ServerCheck
from chorale.requests.openai_client import AsyncClient, Client, Endpoint
from chorale.serve.private_server import private_process, wait_until_healthy


def run_checks(plan: Plan) -> Generator[Check | Outcome]:
    """Yields each check when it begins, then its outcome. Processes end with the iterator: close it."""
    yield from device_outcomes([check for check in plan.checks if check.stage == "device"], plan)
    if checks := [check for check in plan.checks if check.stage == "server"]:
        yield from _server_outcomes(checks, plan)
    yield from device_outcomes([check for check in plan.checks if check.stage == "after"], plan)


def _server_outcomes(checks: Sequence[Check], plan: Plan) -> Iterator[Check | Outcome]:
    """Starts a server (the check "start"), then runs the other checks, or skips them if it did not start."""
    start, *rest = checks
    yield start
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        try:
            started = stack.enter_context(private_process(plan.serve_arguments))
            scheme = "https" if plan.tls else "http"
            endpoint = Endpoint(f"{scheme}://localhost/v1", plan.api_key, started.socket)
            with Client(endpoint) as waiting:
                wait_until_healthy(waiting, started, start.seconds)
                model = waiting.models()[0]
            client = AsyncClient(endpoint, seconds=None)  # each check has its own time limit
            server = Server(plan, started, client, model["id"], model["max_model_len"])
        except (ChoraleError, LookupError) as error:
            yield outcome_of("start", error, begin)
            yield from (Outcome(check.name, "skipped", "there is no server", 0.0) for check in rest)
            return
        detail = f"{server.model}: {server.max_model_len:,} tokens a request"
        yield outcome_of("start", Found(detail), begin)
        runner = stack.enter_context(asyncio.Runner())
        stack.callback(lambda: runner.run(client.http.aclose()))
        for check in rest:
            yield check
            yield runner.run(run_one(check, check.function, server))


async def run_one(check: Check, function: ServerCheck, server: Server) -> Outcome:
    """Runs one check of a server with its time limit. Any exception becomes its outcome."""
    begin = time.perf_counter()
    result: Found | Exception
    try:
        async with asyncio.timeout(check.seconds):
            result = await function(server)
    except TimeoutError:
        result = Failed(f"took longer than {check.seconds:.0f} s; {server.log_tail()}")
    except Exception as error:
        result = error
    return outcome_of(check.name, result, begin)
