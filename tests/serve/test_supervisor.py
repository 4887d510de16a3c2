"""The processes of a server: health, restarts, API processes, signals, and cleanup."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chorale.config.engine import EngineConfig, ServerConfig
from chorale.errors import ConfigError
from chorale.serve import supervisor
from chorale.serve.bootstrap import make_directory
from tests.support import PATIENCE
from tests.support.processes import children, is_running
from tests.support.served import Served

WORKERS = {"api_server_count": 2}
JSON = {"Content-Type": "application/json"}


@dataclass
class Supervised(Served):
    """The supervisor process with fake engines, and the events that it has printed."""

    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def states(self) -> list[str]:
        return [event["state"] for event in self.events if "state" in event]

    def read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            self.port = self.events[-1].get("port", self.port)

    def until_ready(self) -> None:
        self.wait_until("/health answers 200", lambda: self.is_at(200))

    @property
    def engine(self) -> int:
        return min(children(self.process.pid, "fake_engine"))

    def workers(self) -> list[int]:
        return sorted(children(self.process.pid, "api_process"))

    def ended(self) -> int:
        return self.process.wait(60)


@contextlib.contextmanager
def serve(**given: Any) -> Iterator[Supervised]:
    """``given``: the argument of ``serve_fake``. What the processes log is in ``Served.log``."""
    environment = os.environ | {"CHORALE_API_KEY": "secret-of-the-environment"}
    command = [sys.executable, "-m", "tests.support.serve.serve_fake", json.dumps(given)]
    with (
        tempfile.NamedTemporaryFile() as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True) as process,
    ):
        server = Supervised(process, 0, Path(log.name))
        reading = threading.Thread(target=server.read_events)
        reading.start()
        try:
            yield server
        finally:
            if process.poll() is None:
                process.terminate()
                process.terminate()  # a second signal skips the drain
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
            reading.join()


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_health_is_503_with_progress_while_loading_and_sigterm_interrupts_it() -> None:
    with serve(behaviour={"load_seconds": 60.0}) as s:
        s.wait_until("it loads", lambda: s.is_at(503))
        s.wait_until("progress is reported", lambda: s.states)
        time.sleep(0.5)  # one or two heartbeats
        _, health = s.ask("/health")
        assert (health["status"], health["phase"], health["progress"]) == ("loading", "load", 0.5)
        engine = s.engine
        s.process.terminate()
        assert s.process.wait(30) == 0  # half of the loading time
        assert not is_running(engine)


def use_another_vocabulary(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes the HTTP side fail before it listens."""
    (folder / "o200k_base.tiktoken").write_text("IQ== 0\n")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))


@pytest.mark.parametrize("server", [{}, WORKERS], ids=["one", "workers"])
def test_an_error_of_the_http_side_names_the_file_and_leaves_no_socket(
    server: dict[str, int], monkeypatch: pytest.MonkeyPatch, sockets: Path, tmp_path: Path
) -> None:
    use_another_vocabulary(monkeypatch, tmp_path)
    path = sockets / "socket"
    with serve(server=server | {"uds": str(path)}, limits={"backoff": 0.01}) as s:
        assert s.ended() == 2
        said = s.log.read_text()
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


def replace_worker(s: Supervised, number: signal.Signals) -> None:
    """Sends a signal to one of two API workers, and waits until another has taken its place."""
    s.wait_until("two workers", lambda: len(s.workers()) == 2)
    s.until_ready()
    victim = s.workers()[0]
    os.kill(victim, number)
    s.wait_until("a new worker", lambda: len(found := s.workers()) == 2 and victim not in found)


def test_a_dead_worker_or_engine_is_replaced_and_all_die_with_the_supervisor() -> None:
    with serve(server=WORKERS) as s:
        replace_worker(s, signal.SIGKILL)
        for _ in range(20):
            s.until_ready()
        first = s.engine
        os.kill(first, signal.SIGKILL)
        s.wait_until("its end is noticed", lambda: s.is_at(503))
        s.until_ready()
        assert s.engine != first
        s.wait_until("the operator is notified", lambda: s.states[-1] == "ready")
        assert "dead" in s.states
        children = [s.engine, *s.workers()]
        directory = socket_directory(s.engine)
        s.process.kill()
        s.process.wait()
        s.wait_until("all end", lambda: not any(map(is_running, children)))
    with make_directory():  # the next server removes that of the last one
        assert not directory.exists()


def test_a_loading_engine_dies_with_the_supervisor() -> None:
    with serve(behaviour={"load_seconds": 60.0}) as s:
        s.wait_until("it loads", lambda: s.is_at(503))
        engine = s.engine
        s.process.kill()
        s.process.wait()
        s.wait_until("it ends", lambda: not is_running(engine), 30)


def test_a_stopped_api_worker_is_replaced() -> None:
    """The other worker still answers health probes, so only the missing heartbeats reveal it."""
    with serve(server=WORKERS, engine={"heartbeat_timeout": 1.5}) as s:  # 3 s for a worker
        replace_worker(s, signal.SIGSTOP)
        s.until_ready()


@pytest.mark.parametrize(("server", "number"), [({}, signal.SIGQUIT), (WORKERS, signal.SIGHUP)])
def test_stop_signals_let_streams_finish_and_leave_nothing(
    server: dict[str, int], number: signal.Signals
) -> None:
    with serve(behaviour={"step_seconds": 0.05}, server=server) as s:
        s.until_ready()
        children = [s.engine, *s.workers()]
        assert len(children) == (3 if server else 1)
        directory = socket_directory(s.engine)
        assert directory.exists()
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True, "stream": True})
        asked = urllib.request.Request(f"{s.url}/v1/completions", body.encode(), JSON)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            first = answer.readline()
            s.process.send_signal(number)
            rest = answer.read()
        assert first.startswith(b"data: {"), first
        assert b'"finish_reason":"length"' in rest, rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert s.ended() == 0
        s.wait_until("it says that it stops", lambda: {"stopping": True} in s.events)
        assert not any(map(is_running, children))
        assert not directory.exists()


def test_no_key_reaches_argv_or_a_child_and_other_signals_end_none() -> None:
    """SIGUSR1 writes stacks, and SIGUSR2 does nothing. Children ignore signals from a terminal."""
    with serve(keys=["secret-of-the-command"], server=WORKERS) as s:
        s.until_ready()
        assert s.ask("/v1/models")[0] == 401
        assert s.ask("/v1/models", authorization="Bearer secret-of-the-command")[0] == 200
        children = [s.engine, *s.workers()]
        for pid in children:
            for name in ("cmdline", "environ"):
                assert b"secret-of" not in Path(f"/proc/{pid}/{name}").read_bytes()
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            for pid in (s.process.pid, *children):
                os.kill(pid, number)
        for number in (signal.SIGHUP, signal.SIGQUIT):
            for pid in children:
                os.kill(pid, number)
        s.wait_until("stacks", lambda: s.log.read_text().count("(most recent call first)") >= 4)
        s.until_ready()
        assert [s.engine, *s.workers()] == children


def test_a_port_in_use_is_an_error_before_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="in use"):
            supervisor.run(EngineConfig(), ServerConfig(port=taken.getsockname()[1]), supervisor.Observer())
