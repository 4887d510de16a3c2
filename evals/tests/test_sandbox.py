"""The runner of programs: each ends, none reaches another, and none runs without a sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from chorale_evals.graders import sandbox
from chorale_evals.graders.sandbox import Ran, SandboxRunner, open_sandbox, run_program

from chorale.errors import ConfigError
from chorale.tools.python.sandbox import SandboxMissing
from chorale.tools.python.session import Session

T = TypeVar("T")


def within(work: Callable[[SandboxRunner], Awaitable[T]]) -> T:
    async def run() -> T:
        try:
            runner = await open_sandbox()
        except ConfigError as error:
            pytest.skip(str(error))
        return await work(runner)

    return asyncio.run(run())


def test_each_end_of_a_program_has_its_reason() -> None:
    programs = {
        "def f(x):\n    return x + 1\nassert f(1) == 2": "passed",
        "assert 1 + 1 == 3, 'not three'": "AssertionError: not three",
        "import sys\nsys.exit(0)\nassert False": "SystemExit: 0",  # the tests behind it have not run
        "import os\nos._exit(0)": "died",
        "def f(:": "SyntaxError: invalid syntax",
        "#" * (2**20 + 1): "died",  # longer than a cell may be
    }

    async def run(runner: SandboxRunner) -> list[Ran]:
        return await asyncio.gather(*(runner.run(program, 5.0) for program in programs))

    ran = within(run)
    assert [one.reason for one in ran] == list(programs.values())
    assert [one.passed for one in ran] == [True, False, False, False, False, False]


def test_an_endless_program_ends_and_leaves_no_process() -> None:
    started: list[int] = []

    async def run(runner: SandboxRunner) -> Ran:
        whole = Session.start

        async def start(session: Session) -> None:
            await whole(session)
            started.append(session._process.pid)  # type: ignore[union-attr]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "start", start)
            return await runner.run("while True: pass", 0.05)

    assert within(run).kind == "out_of_time"
    assert len(started) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_programs_share_nothing() -> None:
    async def run(runner: SandboxRunner) -> list[Ran]:
        write = "open('/tmp/kept', 'w').write('x')\nkept = 1"
        return [await runner.run(code, 10.0) for code in (write, "kept", "open('/tmp/kept')")]

    first, variable, file = within(run)
    assert first.passed
    assert (variable.reason, file.passed) == ("NameError: name 'kept' is not defined", False)


def test_a_start_that_fails_once_is_repeated_and_never_counts_as_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "_RETRY_SECONDS", 0.0)
    whole, failures = Session.start, [1]
    started: list[int] = []

    async def start(session: Session) -> None:
        await whole(session)
        started.append(session._process.pid)  # type: ignore[union-attr]
        if failures:
            failures.pop()
            raise SandboxMissing("no memory for a process")

    async def run(runner: SandboxRunner) -> Ran:
        monkeypatch.setattr(Session, "start", start)
        first = await runner.run("1", 10.0)
        failures[:] = [1, 1, 1]
        with pytest.raises(ConfigError, match="has stopped working: no memory"):
            await runner.run("1", 10.0)
        return first

    assert within(run).passed
    assert len(started) == 5
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_without_a_sandbox_nothing_runs_and_the_error_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(*_: object) -> None:
        raise SandboxMissing("not installed (apt install it)")

    monkeypatch.setattr("chorale.tools.options.check_program", missing)
    with pytest.raises(ConfigError, match=r"in a sandbox only: no sandbox works here.*apt install it"):
        asyncio.run(run_program("1"))
    monkeypatch.setenv("PYTHON_EXECUTION_BACKEND", "none")
    with pytest.raises(ConfigError, match="PYTHON_EXECUTION_BACKEND=none"):
        asyncio.run(run_program("1"))


def test_one_event_loop_opens_one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str | None] = []
    whole = open_sandbox

    async def counted() -> SandboxRunner:
        opened.append(None)
        return await whole()

    monkeypatch.setattr(sandbox, "open_sandbox", counted)

    async def run(_runner: SandboxRunner) -> list[Ran]:
        return list(await asyncio.gather(run_program("1"), run_program("2")))

    assert [one.output for one in within(run)] == ["1\n", "2\n"]
    assert len(opened) == 1
