"""A real ``chorale serve`` process, and the OpenAI SDK."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from tests.support import PATIENCE
from tests.support.ports import free_port
from tests.support.processes import children, cpu_seconds


@dataclass
class Served:
    process: subprocess.Popen[str]
    port: int
    log: Path
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        """Returns an SDK client; its connections are closed with the server."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE)
        self.clients.append(client)
        return client

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Returns (status, JSON); uses POST if there is a body. Raises ``OSError`` if nothing listens."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def health(self) -> int:
        return self.ask("/health")[0]

    def is_at(self, status: int, path: str = "/health") -> bool:
        """Returns whether it answers with the status."""
        with contextlib.suppress(OSError):
            return self.ask(path)[0] == status
        return False

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as response:
            return str(response.read().decode())

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        lines = [line for line in self.metrics().splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def engine_pids(self) -> list[int]:
        return sorted(children(self.process.pid, "serve.engine.process"))

    def cpu_seconds(self) -> float:
        """Returns the CPU time of the server's and the engines' processes."""
        return sum(cpu_seconds(pid) for pid in (self.process.pid, *self.engine_pids()))

    def wait_until(self, what: str, condition: object, seconds: float = PATIENCE) -> float:
        started = time.monotonic()
        while not condition():  # type: ignore[operator]
            assert time.monotonic() - started < seconds, (
                f"{what}: not within {seconds} s\n{self.log.read_text()}"
            )
            time.sleep(0.05)  # the condition may ask for all metrics
        return time.monotonic() - started


def at_once(*asks: Callable[[], Any]) -> list[Any]:
    """Calls all concurrently and returns their results. Demo steps with several rows take hardly longer."""
    with ThreadPoolExecutor(len(asks)) as pool:
        return [found.result() for found in [pool.submit(ask) for ask in asks]]


@contextlib.contextmanager
def serving(model: str | Path, folder: Path, *options: str) -> Iterator[Served]:
    """Runs ``chorale serve MODEL ...`` and yields it once healthy; then sends SIGTERM, or else SIGKILL."""
    port, log = free_port(), folder / f"serve-{time.monotonic_ns()}.log"
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "chorale", "serve", str(model), "--port", str(port), *options]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, text=True)
    served = Served(process, port, log)

    def healthy() -> bool:
        assert process.poll() is None, log.read_text()
        return served.is_at(200)

    try:
        served.wait_until("it is healthy", healthy)
        yield served
    finally:
        for client in served.clients:
            client.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
