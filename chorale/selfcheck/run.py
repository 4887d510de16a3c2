"""Runs the checks: those of the device in a child, those of the server over HTTP, each within its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from chorale.config.engine import EngineConfig
from chorale.errors import ChoraleError
from chorale.selfcheck.check import Check, Failed, Found, Outcome, Place, Skipped
from chorale.selfcheck.child import device_outcomes
from chorale.selfcheck.recorded import Recording, write_recording
from chorale.selfcheck.serving import harmony, load, record
from chorale.selfcheck.serving.context import Context, ServerCheck
from chorale.selfcheck.serving.server import Server, StartServer, client_of

_SERVER_CHECKS: dict[str, ServerCheck] = {
    "harmony": harmony.check_harmony,
    "stops": harmony.check_stops,
    "tools": harmony.check_tools,
    "grammar": harmony.check_grammar,
    "record": record.check_record,
    "needle": record.check_needle,
    "disconnects": load.check_disconnects,
    "memory": load.check_memory,
    "kill": load.check_kill,
}
_HEALTHY_SECONDS = 20.0  # in which a server must be healthy between two checks

Report = Callable[[Check | Outcome], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """``folder``: a place for files of this run."""

    checks: Sequence[Check]
    config: EngineConfig
    quick: bool
    folder: Path
    start_server: StartServer
    context: Context
    api_key: str | None = field(default=None, repr=False)
    tls: bool = False

    def of(self, *places: Place) -> list[Check]:
        return [check for check in self.checks if check.place in places]


async def run_checks(plan: Plan, report: Report) -> list[Outcome]:
    """Runs all checks of the plan. ``report`` gets each check when it begins, and its outcome."""
    outcomes: list[Outcome] = []

    def note(message: Check | Outcome) -> None:
        if isinstance(message, Outcome):
            outcomes.append(message)
        report(message)

    recording = plan.folder / "recorded.json"
    async for message in device_outcomes(
        plan.of("files", "device"), plan.config, quick=plan.quick, recording=None
    ):
        note(message)
    if server_checks := plan.of("server"):
        await _run_server(plan, server_checks, note)
    if plan.context.sequences:
        write_recording(recording, Recording(plan.context.sequences))
    async for message in device_outcomes(
        plan.of("after"), plan.config, quick=plan.quick, recording=recording
    ):
        note(message)
    return outcomes


async def _run_server(plan: Plan, checks: list[Check], note: Report) -> None:
    """Runs the checks of one server; a server that does not recover from a check is started anew."""
    rest = list(checks)
    while rest:
        start, rest = (rest[0], rest[1:]) if rest[0].name == "start" else (None, rest)
        if start is not None:
            note(start)
        begin = time.perf_counter()
        try:
            with plan.start_server() as started:
                async with client_of(started.socket, plan.api_key, tls=plan.tls) as client:
                    server = Server(started, client)
                    try:
                        await _ready(server, start.seconds if start is not None else 1200.0)
                    except Failed as fault:
                        _give_up(start, rest, fault.detail, time.perf_counter() - begin, note)
                        return
                    if start is not None:
                        sizes = (
                            f"{server.max_model_len:,} tokens a request, {server.kv_tokens:,} in the KV pool"
                        )
                        seconds = time.perf_counter() - begin
                        note(Outcome("start", "ok", f"{server.model}: {sizes}", seconds))
                    rest = await _run_some(plan, server, rest, note)
        except ChoraleError as error:
            _give_up(start, rest, error.message, time.perf_counter() - begin, note)
            return


async def _ready(server: Server, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await server.wait_ready()
            await server.learn()
    except TimeoutError:
        raise Failed(f"not ready within {seconds:.0f} s: {server.log_tail()}") from None
    except (httpx2.HTTPError, KeyError, IndexError, ValueError) as error:
        raise Failed(f"it started, but does not say what it serves: {error}") from None


def _give_up(start: Check | None, rest: list[Check], detail: str, seconds: float, note: Report) -> None:
    """All checks that are left have no server."""
    if start is not None:
        note(Outcome("start", "failed", detail, seconds))
    for check in rest:
        note(check)
        verdict, why = ("skipped", "there is no server") if start is not None else ("failed", detail)
        note(Outcome(check.name, verdict, why, 0.0))  # type: ignore[arg-type]


async def _run_some(plan: Plan, server: Server, checks: list[Check], note: Report) -> list[Check]:
    """Runs checks until one leaves the server broken; returns those that are left."""
    for number, check in enumerate(checks):
        note(check)
        note(await run_one(check, _SERVER_CHECKS[check.name], server, plan.context))
        if not await _recovers(server):
            return checks[number + 1 :]
    return []


async def run_one(check: Check, function: ServerCheck, server: Server, context: Context) -> Outcome:
    """Runs one check of a server within its time; whatever it raises becomes its outcome."""
    begin = time.perf_counter()

    def seconds() -> float:
        return time.perf_counter() - begin

    try:
        async with asyncio.timeout(check.seconds):
            found: Found = await function(server, context)
    except Failed as fault:
        return Outcome(check.name, "failed", fault.detail, seconds(), fault.facts)
    except Skipped as reason:
        return Outcome(check.name, "skipped", str(reason), seconds())
    except TimeoutError:
        detail = f"took longer than {check.seconds:.0f} s; {server.log_tail()}"
        return Outcome(check.name, "failed", detail, seconds())
    except Exception as error:
        while isinstance(error, ExceptionGroup):  # of concurrent requests
            error = error.exceptions[0]
        if isinstance(error, Failed):
            return Outcome(check.name, "failed", error.detail, seconds(), error.facts)
        return Outcome(check.name, "failed", f"{type(error).__name__}: {str(error)[:300]}", seconds())
    return Outcome(check.name, "ok", found.detail, seconds(), found.facts)


async def _recovers(server: Server) -> bool:
    deadline = time.monotonic() + _HEALTHY_SECONDS
    while time.monotonic() < deadline:
        if server.started.process.poll() is not None:
            return False
        if await server.is_healthy():
            return True
        await asyncio.sleep(0.2)
    return False
