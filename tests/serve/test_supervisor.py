"""The processes of a server: health, restarts, API processes, signals, and cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chorale.config.engine import EngineConfig, ServerConfig
from chorale.errors import ConfigError
from chorale.serve import supervisor
from chorale.serve.bootstrap import make_directory
from tests.support import PATIENCE
from tests.support.processes import is_running
from tests.support.serve.harness import until

SCRIPT = "tests.support.serve.serve_fake"
WORKERS = {"api_server_count": 2}
JSON = {"Content-Type": "application/json"}


@dataclass
class Supervised:
    """The supervisor process, and the events that it has printed."""

    process: asyncio.subprocess.Process
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def states(self) -> list[str]:
        return [event["state"] for event in self.events if "state" in event]

    @property
    def port(self) -> int:
        return next(int(event["port"]) for event in self.events if "port" in event)

    async def listening(self) -> None:
        await until(lambda: any("port" in event for event in self.events), "it listens")

    async def answers(self, status: int, path: str = "/health") -> float:
        """Wait until the path answers with the status. Returns the seconds waited."""
        start = time.monotonic()
        while await self.get(path) != status:
            assert time.monotonic() - start < PATIENCE, f"{path} never answered {status}"
            await asyncio.sleep(0.05)
        return time.monotonic() - start

    async def get(self, path: str, **headers: str) -> int | None:
        return (await asyncio.to_thread(fetch, self.port, path, headers))[0]

    def children(self, module: str) -> list[int]:
        """Returns the live children of the supervisor whose command line contains ``module``."""
        found = []
        for entry in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError):
                if module.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                    found.append(int(entry))
        return found

    @property
    def engine(self) -> int:
        return self.children("fake_engine")[0]


def fetch(port: int, path: str, headers: dict[str, str]) -> tuple[int | None, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return None, b""
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def serve(*, stderr: int | None = None, **given: Any) -> AsyncIterator[Supervised]:
    environment = os.environ | {"CHORALE_API_KEY": "secret-of-the-environment"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        SCRIPT,
        json.dumps(given),
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=environment,
    )
    server = Supervised(process)
    reading = asyncio.ensure_future(read_events(server))
    try:
        yield server
    finally:
        if process.returncode is None:
            process.terminate()
            process.terminate()  # a second signal skips the drain
        try:
            await asyncio.wait_for(process.wait(), PATIENCE)
        except TimeoutError:
            process.kill()
            await process.wait()
        await reading


async def read_events(server: Supervised) -> None:
    assert server.process.stdout is not None
    async for line in server.process.stdout:
        server.events.append(json.loads(line))


async def ended(server: Supervised, seconds: float = 60.0) -> int:
    return await asyncio.wait_for(server.process.wait(), seconds)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


async def test_health_is_503_with_progress_while_loading_and_sigterm_interrupts_it() -> None:
    async with serve(behaviour={"load_seconds": 60.0}) as s:
        await s.listening()
        await s.answers(503)
        await until(lambda: s.states, "progress is reported")
        await asyncio.sleep(0.5)  # one or two heartbeats
        _, body = await asyncio.to_thread(fetch, s.port, "/health", {})
        health = json.loads(body)
        assert (health["status"], health["phase"], health["progress"]) == ("loading", "load", 0.5)
        engine = s.engine
        s.process.terminate()
        assert await ended(s, 30.0) == 0  # half of the loading time
        assert not is_running(engine)


def use_another_vocabulary(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes the HTTP side fail before it listens."""
    (folder / "o200k_base.tiktoken").write_text("IQ== 0\n")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))


@pytest.mark.parametrize("server", [{}, WORKERS], ids=["one", "workers"])
async def test_an_error_of_the_http_side_names_the_file_and_leaves_no_socket(
    server: dict[str, int], monkeypatch: pytest.MonkeyPatch, sockets: Path, tmp_path: Path
) -> None:
    use_another_vocabulary(monkeypatch, tmp_path)
    path, options = sockets / "socket", {"stderr": asyncio.subprocess.PIPE, "limits": {"backoff": 0.01}}
    async with serve(server=server | {"uds": str(path)}, **options) as s:
        assert s.process.stderr is not None
        said = (await s.process.stderr.read()).decode()
        assert await ended(s) == 2
    assert str(tmp_path / "o200k_base.tiktoken") in said
    assert "Traceback" not in said, said
    assert not path.exists()


def socket_directory(engine: int) -> Path:
    for line in Path(f"/proc/{engine}/net/unix").read_text().splitlines():
        path = Path(line.split()[-1])
        if path.name == "engine" and "chorale-" in str(path):
            holders = os.listdir(f"/proc/{engine}/fd")
            links = {os.readlink(f"/proc/{engine}/fd/{fd}") for fd in holders if not fd.isspace()}
            if f"socket:[{line.split()[6]}]" in links:
                return path.parent
    raise AssertionError("the engine has no socket")


async def replaced(s: Supervised, number: signal.Signals, deadline: float = PATIENCE) -> None:
    """Sends a signal to one of two API workers, and waits until another has taken its place."""
    await s.listening()
    await until(lambda: len(s.children("api_process")) == 2, "two workers")
    await s.answers(200)
    victim = s.children("api_process")[0]
    os.kill(victim, number)
    await until(
        lambda: len(s.children("api_process")) == 2 and victim not in s.children("api_process"),
        "a new worker",
        deadline,
    )


async def test_a_dead_api_worker_or_engine_is_replaced_and_the_others_serve_meanwhile() -> None:
    async with serve(server=WORKERS) as s:
        await replaced(s, signal.SIGKILL)
        for _ in range(20):
            await s.answers(200)
        first = s.engine
        os.kill(first, signal.SIGKILL)
        await s.answers(503)
        await s.answers(200)
        assert s.engine != first
        await until(lambda: s.states[-1] == "ready", "the operator is notified")
        assert "dead" in s.states


async def test_a_stopped_api_worker_is_replaced() -> None:
    """The other worker still answers health probes, so only the missing heartbeats reveal it."""
    async with serve(server=WORKERS, engine={"heartbeat_timeout": 1.5}) as s:  # 3 s for a worker
        await replaced(s, signal.SIGSTOP, 180)
        await s.answers(200)


async def test_children_die_with_a_killed_supervisor() -> None:
    async with serve(server=WORKERS) as s:
        await s.listening()
        await s.answers(200)
        children = [s.engine, *s.children("api_process")]
        directory = socket_directory(s.engine)
        s.process.kill()
        await s.process.wait()
        await until(lambda: not any(is_running(pid) for pid in children), "all end")
    with make_directory():  # the next server removes that of the last one
        assert not directory.exists()


@pytest.mark.parametrize(("server", "number"), [({}, signal.SIGQUIT), (WORKERS, signal.SIGHUP)])
async def test_stop_signals_let_streams_finish_and_leave_nothing(
    server: dict[str, int], number: signal.Signals
) -> None:
    async with serve(behaviour={"step_seconds": 0.05}, server=server) as s:
        await s.listening()
        await s.answers(200)
        children = [s.engine, *s.children("api_process")]
        assert len(children) == (3 if server else 1)
        directory = socket_directory(s.engine)
        assert directory.exists()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", s.port, timeout=60)) as client:
            body = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True, "stream": True}
            await asyncio.to_thread(client.request, "POST", "/v1/completions", json.dumps(body), JSON)
            answer = await asyncio.to_thread(client.getresponse)
            first = await asyncio.to_thread(answer.readline)
            s.process.send_signal(number)
            rest = await asyncio.to_thread(answer.read)
        assert first.startswith(b"data: {"), first
        assert b'"finish_reason":"length"' in rest, rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await ended(s) == 0
        assert {"stopping": True} in s.events
        assert not any(is_running(pid) for pid in children)
        assert not directory.exists()


async def test_no_key_reaches_argv_or_a_child_and_other_signals_end_none() -> None:
    """SIGUSR1 writes stacks, and SIGUSR2 does nothing. Children ignore signals from a terminal."""
    keys = ["secret-of-the-command"]
    async with serve(keys=keys, server=WORKERS, stderr=asyncio.subprocess.PIPE) as s:
        await s.listening()
        await s.answers(200)
        assert await s.get("/v1/models") == 401
        assert await s.get("/v1/models", authorization="Bearer secret-of-the-command") == 200
        children = [s.engine, *s.children("api_process")]
        for pid in children:
            for name in ("cmdline", "environ"):
                assert b"secret-of" not in Path(f"/proc/{pid}/{name}").read_bytes()
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            for pid in (s.process.pid, *children):
                os.kill(pid, number)
        for number in (signal.SIGHUP, signal.SIGQUIT):
            for pid in children:
                os.kill(pid, number)
        assert s.process.stderr is not None
        said = b""
        while said.count(b"(most recent call first)") < 4:
            said += await s.process.stderr.read(4096)
        await s.answers(200)
        assert [s.engine, *s.children("api_process")] == children


def test_a_port_in_use_is_an_error_before_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="in use"):
            supervisor.run(EngineConfig(), ServerConfig(port=taken.getsockname()[1]), supervisor.Observer())
