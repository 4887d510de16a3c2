"""Measures the HTTP side: CPU time of the server process for each streamed chat token.

    python -m benchmarks.serving.http_host_cost
    python -m benchmarks.serving.http_host_cost --streams 512 --profile

The real server (uvicorn, uvloop, httptools, our guard, the chat endpoint with harmony parsing, metrics)
runs in a separate process. The engine's socket is replaced by an object that gives each stream one
token per step, at a pace that leaves the server idle time, so that tokens do not pile up into larger (and
cheaper) pieces; the share of tokens in separate pieces is printed. Clients are raw sockets in this process.
The time is measured from the tenth step to the last but one, by getrusage of the server process. It excludes
the arrival of the requests and the decoding of the engine process's messages (see ``engine/ipc_cost.py``),
and includes the work of the stand-in engine, whose share is printed. "kernel" is the part in system
calls; over loopback TCP it includes the receiving side's protocol work too.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import resource
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from chorale.api.app import create_app
from chorale.api.listening import Stop, bind_sockets
from chorale.api.state import ServerState
from chorale.api.telemetry.metrics import Metrics
from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.stream import RequestStream
from chorale.config.engine import ServerConfig
from chorale.engine.types import ChunkTimings, EngineStats, GenerateRequest, TokenChunk
from chorale.harmony.vocab import load_vocabulary
from chorale.jobs.background import Background
from chorale.machine.processes import quiet_collector
from chorale.serve.http.server import serve_app
from chorale.store.store import open_store

TEXT = "The tide turned before dawn, and the harbour lights went out one after another; nobody spoke. "
FIRST_STEP = 10
BUDGET_US = 20.0


def cpu_seconds() -> tuple[float, float]:
    """Returns the CPU seconds of this process: (total, part spent in the kernel)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_stime


@dataclass
class PacedEngine:
    """An ``EngineClient`` that starts once ``num_streams`` requests wait, and gives each a token a step."""

    token_ids: list[int]
    num_streams: int
    interval: float
    profile: cProfile.Profile | None = None
    info: EngineInfo = field(
        default_factory=lambda: EngineInfo(model="paced", max_model_len=131072, max_num_seqs=4096)
    )
    status: EngineStatus = field(default_factory=lambda: EngineStatus("ready"))
    stats: EngineStats = field(default_factory=EngineStats)
    streams: dict[str, RequestStream] = field(default_factory=dict)
    report: dict[str, float] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def engines(self) -> tuple[PacedEngine, ...]:
        return (self,)

    @property
    def num_in_flight(self) -> int:
        return len(self.streams)

    def submit(self, request: GenerateRequest) -> RequestStream:
        stream = RequestStream(request.request_id, 1, self.abort)
        self.streams[request.request_id] = stream
        if len(self.streams) == self.num_streams:
            self.task = asyncio.create_task(self.play())
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.streams.pop(request_id, None)

    async def close(self) -> None:
        self.streams.clear()

    async def play(self) -> None:
        began, own = (0.0, 0.0), 0.0
        num_late = 0
        due = time.monotonic() + 0.5
        last = len(self.token_ids) - 1
        for step, token_id in enumerate(self.token_ids):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due + self.interval, time.monotonic())
            if step == FIRST_STEP:
                began, own, num_late = cpu_seconds(), 0.0, 0
                if self.profile is not None:
                    self.profile.enable()
            if step == last:
                if self.profile is not None:
                    self.profile.disable()
                self._conclude(began, own, num_late, last - FIRST_STEP)
            start = time.thread_time()
            num_late += self._step(step, token_id, step == last)
            own += time.thread_time() - start
        self.done.set()

    def _step(self, step: int, token_id: int, is_last: bool) -> int:
        """Gives each stream a token. Returns how many streams had not read the previous one."""
        self.stats = EngineStats(
            num_running=len(self.streams), num_steps=step, last_step_tokens=len(self.streams)
        )
        num_late = 0
        timings = ChunkTimings(0.0, 1.0, 1.0, 1.0, 0) if is_last else None
        for request_id, stream in self.streams.items():
            num_late += stream.num_pending_tokens > 0
            stream.push(
                TokenChunk(
                    request_id, 0, [token_id], "stop" if is_last else None, None, None, 0, None, timings
                )
            )
        return num_late

    def _conclude(self, began: tuple[float, float], own: float, num_late: int, num_steps: int) -> None:
        tokens = num_steps * self.num_streams
        total, kernel = cpu_seconds()
        self.report = {
            "us_per_token": (total - began[0]) / tokens * 1e6,
            "kernel_us_per_token": (kernel - began[1]) / tokens * 1e6,
            "engine_us_per_token": own / tokens * 1e6,
            "own_piece": 1 - num_late / tokens,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def announce(listening: socket.socket) -> None:
    print(json.dumps(listening.getsockname()), flush=True)


async def serve(arguments: argparse.Namespace) -> None:
    vocab = load_vocabulary()
    text = vocab.encode(TEXT * (arguments.steps // 20 + 1))[: arguments.steps]
    header = vocab.encode_with_special("<|channel|>final<|message|>")
    profile = cProfile.Profile() if arguments.profile else None
    engine = PacedEngine([*header, *text, 200002], arguments.streams, arguments.interval, profile)
    config = ServerConfig(uds=arguments.uds, port=0, access_log=False, response_store=":memory:")
    sockets = bind_sockets(config)
    store = open_store(config)
    state = ServerState(engine, config, vocab, Metrics("paced"), store, ("paced",), Background(store))
    stop = Stop()
    app = create_app(state)
    with quiet_collector((10_000, 20, 100)):
        serving = asyncio.create_task(serve_app(app, config, [], sockets, stop))
        announce(sockets[0])
        await engine.done.wait()
        await asyncio.sleep(0.5)
        stop()
        await serving
    await store.close()
    print(json.dumps(engine.report), flush=True)
    if profile is not None:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)


def read_all(address: str | list[object], num_streams: int) -> int:
    """Opens all streams and reads each to its end. Returns the number of events."""
    body = json.dumps(
        {"model": "paced", "stream": True, "messages": [{"role": "user", "content": "Tell me of the sea."}]}
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        stream = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        stream.connect(address if isinstance(address, str) else tuple(address))
        stream.sendall(request)
        selector.register(stream, selectors.EVENT_READ)
    num_events = 0
    while selector.get_map():
        for key, _ in selector.select(30):
            stream = key.fileobj  # type: ignore[assignment]
            data = stream.recv(262_144)
            num_events += data.count(b"data: ")
            if not data or data.endswith(b"0\r\n\r\n"):
                selector.unregister(stream)
                stream.close()
    return num_events


def measure(num_streams: int, unix: bool, arguments: argparse.Namespace) -> dict[str, float]:
    steps = arguments.steps
    with TemporaryDirectory() as folder:
        options = [f"--streams={num_streams}", f"--steps={steps}"]
        options.append(f"--interval={num_streams * arguments.pace * 1e-6}")
        options += [f"--uds={Path(folder) / 'http'}"] if unix else []
        options += ["--profile"] if arguments.profile else []
        command = [sys.executable, "-m", "benchmarks.serving.http_host_cost", "--serve", *options]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            num_events = read_all(json.loads(server.stdout.readline()), num_streams)
            report: dict[str, float] = json.loads(server.stdout.readline())
            server.wait(30)
        finally:
            server.kill()
            server.communicate()
    report["events_per_token"] = num_events / (num_streams * (steps + 4))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=0, help="one size instead of 64, 512 and 1024")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--pace", type=float, default=60.0, help="microseconds between tokens, all streams together"
    )
    parser.add_argument("--profile", action="store_true", help="print a profile (slows the server down)")
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {BUDGET_US} us a token")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--uds", help=argparse.SUPPRESS)
    parser.add_argument("--interval", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        import uvloop

        uvloop.run(serve(arguments))
        return
    worst = 0.0
    print("streams  socket  us/token  kernel  stand-in engine  own pieces  events/token  peak MiB")
    for num_streams in [arguments.streams] if arguments.streams else [64, 512, 1024]:
        for unix in (False, True):
            found = measure(num_streams, unix, arguments)
            worst = max(worst, found["us_per_token"])
            print(
                f"{num_streams:7d}  {'unix' if unix else 'tcp':>6}  {found['us_per_token']:8.1f}  "
                f"{found['kernel_us_per_token']:6.1f}  {found['engine_us_per_token']:15.1f}  "
                f"{found['own_piece']:10.1%}  {found['events_per_token']:12.2f}  {found['peak_mib']:8.0f}"
            )
    if arguments.check and worst > BUDGET_US:
        sys.exit(f"{worst:.1f} us a token is above the budget of {BUDGET_US} us")


if __name__ == "__main__":
    main()
