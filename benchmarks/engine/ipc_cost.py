"""Measures messages between client and engine process: one step of many rows, and the round trip of one.

    python -m benchmarks.engine.ipc_cost [--rows 1024] [--steps 500]

The engine side is a real second process with the product's loop, server_socket and heartbeat around a core
that only counts tokens, so only the communication is measured. Prints microseconds: medians over the steps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from benchmarks.timing import times
from chorale.client.base import EngineInfo
from chorale.client.in_flight import InFlightRequests
from chorale.client.remote import RemoteClient
from chorale.client.wire import messages as wire
from chorale.config.engine import EngineConfig
from chorale.engine.types import EngineStats, GenerateRequest, SamplingSpec, StepOutputs, TokenChunk
from chorale.serve.bootstrap import EngineStart, make_directory, read_start
from chorale.serve.engine.process import Progress, run_engine_process
from chorale.serve.engine.socket import EngineServerSocket


class CountingCore:
    """Each step gives every request one token: the time at which the step began, in microseconds."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._live: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add_request(self, request: GenerateRequest) -> None:
        self._live[request.request_id] = request.sampling.max_tokens or 1

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def step(self) -> list[TokenChunk]:
        time.sleep(self._step_seconds)
        chunks, now = [], int(time.time() * 1e6)
        for request_id, left in list(self._live.items()):
            self._live[request_id] = left - 1
            if left == 1:
                del self._live[request_id]
            chunks.append(TokenChunk(request_id, 0, [now], finish_reason="length" if left == 1 else None))
        return chunks

    def use_idle_time(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._live))


def build(config: EngineConfig, progress: Progress) -> tuple[CountingCore, EngineInfo]:
    step_seconds = config.seed / 1e6  # the child gets only the configuration
    return CountingCore(step_seconds), EngineInfo(model="counting", max_model_len=2**20, max_num_seqs=4096)


def timed(function: Callable[[], object], repeats: int = 300) -> float:
    """Returns the median microseconds of one call."""
    return statistics.median(times(function, repeats)) * 1e6


def show(name: str, microseconds: float, rows: int) -> None:
    print(f"{name:<52}{microseconds:>10.0f} us{microseconds / rows:>9.2f} us/row")


def in_process(rows: int) -> None:
    """Measures encoding, decoding and dispatch, without sockets."""
    ids = [f"chatcmpl-{i:032x}" for i in range(rows)]
    message = wire.StepMessage(
        "0123456789abcdef", StepOutputs([TokenChunk(i, 0, [1234]) for i in ids], EngineStats())
    )
    data = wire.encode(message)
    decoded = wire.decode_from_engine(data)
    assert isinstance(decoded, wire.StepMessage)
    flights = InFlightRequests(time.monotonic)
    streams = [flights.admit(GenerateRequest(request_id=i, prompt_token_ids=[1]), print) for i in ids]
    print(f"one step's message, {rows} rows: {len(data)} bytes")
    show("encode", timed(lambda: wire.encode(message)), rows)
    show("decode", timed(lambda: wire.decode_from_engine(data)), rows)

    def dispatch() -> None:
        flights.deliver(decoded.step.chunks)
        for stream in streams:
            stream._pending.clear()

    show("dispatch to the streams (nobody waiting)", timed(dispatch), rows)


def engine_side(rows: int) -> None:
    """Measures a step's cost in the engine's main thread: group by client, encode, hand to the socket."""
    folder = make_directory()
    directory = folder.path
    server_socket = EngineServerSocket(str(directory), "e", client_timeout=60, on_orphans=print)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(wire.engine_address(directory))
        dealer.send(wire.encode(wire.Register()))
        server_socket.wait(5)
        [(client, _)] = server_socket.receive()
        chunks = [TokenChunk(f"chatcmpl-{i:032x}", 0, [1234]) for i in range(rows)]
        for chunk in chunks:
            server_socket.own(client, chunk.request_id, 1)
        stats = EngineStats()
        show(
            "engine's thread: group, encode, send", timed(lambda: server_socket.deliver(chunks, stats)), rows
        )
    server_socket.close()
    folder.remove()


def thread_seconds(pid: int) -> dict[str, float]:
    """Returns the engine process's CPU seconds by thread (Linux only). The heartbeat has its own thread."""
    found = {}
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda task: int(task.name)):
        name = "main" if task.name == str(pid) else (task / "comm").read_text().strip()
        number = sum(other.startswith(name) for other in found)
        found[f"{name} {number}" if number else name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


async def across(rows: int, steps: int, step_microseconds: int) -> None:
    """Measures a step through the socket: the time until the last of ``rows`` readers has its token."""
    folder = make_directory()
    directory = folder.path
    engine = start_engine(directory, step_microseconds)
    client = RemoteClient(directory)
    client.start()
    try:
        while client.status.state != "ready":
            await asyncio.sleep(0.01)
        latest: dict[int, float] = {}

        async def read(index: int) -> None:
            sampling = SamplingSpec(max_tokens=steps)
            request = GenerateRequest(
                request_id=f"chatcmpl-{index:032x}", prompt_token_ids=[1], sampling=sampling
            )
            async for chunks in client.submit(request):
                now = time.time() * 1e6
                for chunk in chunks:
                    latest[chunk.token_ids[0]] = now

        threads = thread_seconds(engine.pid)
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(read(i) for i in range(rows)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        late = [now - began for began, now in latest.items()]
        show(f"step's end to the last of {rows} readers, median", statistics.median(late), rows)
        show("client's CPU a step, readers included", cpu / steps * 1e6, rows)
        for name, seconds in thread_seconds(engine.pid).items():
            show(f"engine process, thread {name}", (seconds - threads.get(name, 0.0)) / steps * 1e6, rows)
        print(f"  ({steps} steps of {step_microseconds} us of engine time in {wall:.2f} s)")
    finally:
        await client.close()
        engine.terminate()
        engine.wait()
        folder.remove()


async def round_trips(count: int) -> None:
    """Measures the round trip of a request for one token."""
    folder = make_directory()
    directory = folder.path
    engine = start_engine(directory, 0)
    client = RemoteClient(directory)
    client.start()
    try:
        while client.status.state != "ready":
            await asyncio.sleep(0.01)
        seconds = []
        for index in range(count):
            sampling = SamplingSpec(max_tokens=1)
            request = GenerateRequest(request_id=f"r{index}", prompt_token_ids=[1] * 16, sampling=sampling)
            start = time.perf_counter()
            async for _ in client.submit(request):
                pass
            seconds.append(time.perf_counter() - start)
        seconds.sort()
        p50, p99 = seconds[count // 2] * 1e6, seconds[int(count * 0.99)] * 1e6
        print(f"round trip of one request, one row (idle engine): p50 {p50:.0f} us, p99 {p99:.0f} us")
    finally:
        await client.close()
        engine.terminate()
        engine.wait()
        folder.remove()


def start_engine(directory: Path, step_microseconds: int) -> subprocess.Popen[bytes]:
    engine = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.engine.ipc_cost", "--engine"], stdin=subprocess.PIPE
    )
    config = EngineConfig(seed=step_microseconds)
    start = EngineStart(directory=str(directory), config=config, parent_pid=os.getpid())
    assert engine.stdin is not None
    engine.stdin.write(msgspec.msgpack.encode(start))
    engine.stdin.close()
    return engine


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=1024)
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--step-microseconds", type=int, default=5000)
    options.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.engine:
        sys.exit(run_engine_process(read_start(sys.stdin.buffer, EngineStart), build))
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        print("event loop: uvloop")
    except ImportError:
        runner = asyncio.Runner()
        print("event loop: asyncio")
    in_process(given.rows)
    engine_side(given.rows)
    with runner:
        runner.run(across(given.rows, given.steps, given.step_microseconds))
        runner.run(round_trips(2000))


if __name__ == "__main__":
    main()
