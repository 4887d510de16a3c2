"""Checks of a server under load and after faults: disconnects, a full KV pool, a killed engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time

import httpx2

from chorale.selfcheck.check import Failed, Found, Skipped
from chorale.selfcheck.serving.context import Context
from chorale.selfcheck.serving.server import Server

_DISCONNECTS, _AT_ONCE = 200, 40
_WORDS = 199_000
_FULL = 0.95  # of the pool
_FILL_SECONDS = 240.0
_BESIDE_DECODES = 4  # times as long as a prompt alone takes: those that are in the pool decode meanwhile
_PROBE = {"prompt": "One two three four", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


async def check_disconnects(server: Server, context: Context) -> Found:
    """Clients leave in the prompt, after the first event and in the middle; nothing is left of them."""
    turns = asyncio.Semaphore(_AT_ONCE)
    generator = random.Random(5)
    jobs = []
    for number in range(_DISCONNECTS):
        tokens = [generator.randrange(_WORDS) for _ in range(generator.randrange(4, 200))]
        jobs.append(_leave(server, turns, tokens, (0, 1, 4)[number % 3]))
    left = await asyncio.gather(*jobs)
    await server.wait_idle(15.0)
    choice = await server.complete(**_PROBE)
    if choice["finish_reason"] != "length":
        raise Failed(f"a request after them ended with {choice['finish_reason']}")
    early = sum(left)
    return Found(f"{_DISCONNECTS} clients left ({early} before an event), no request and no block is left")


async def _leave(server: Server, turns: asyncio.Semaphore, tokens: list[int], events: int) -> bool:
    """Leaves after so many events; returns whether it was before the first."""
    body = {"prompt": tokens, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    async with turns:
        if events == 0:  # while the prompt waits or is computed
            with contextlib.suppress(TimeoutError, httpx2.HTTPError):
                async with asyncio.timeout(0.05), server.stream("/v1/completions", body):
                    pass
            return True
        async with server.stream("/v1/completions", body) as response:
            seen = 0
            async for line in response.aiter_lines():
                seen += line.startswith("data:")
                if seen >= events:
                    break
        return False


async def check_memory(server: Server, context: Context) -> Found:
    """Fills the KV pool with requests that keep running, until it is full or requests must wait."""
    speed = await _prompt_speed(server)
    needed = _BESIDE_DECODES * server.kv_tokens / max(speed, 1.0)
    if needed > _FILL_SECONDS * 0.7:
        raise Skipped(
            f"the pool's {server.kv_tokens:,} tokens would take about {needed:,.0f} s; "
            "--kv-cache-memory-bytes makes it smaller"
        )
    rows = context.max_num_seqs * server.num_engines
    # As short as three quarters of the rows can be to fill the pool: long prompts take longer a token.
    length = max(64, min(server.max_model_len * 3 // 4, server.kv_tokens // max(1, rows * 3 // 4)))
    if rows * server.max_model_len < _FULL * server.kv_tokens:
        raise Skipped(f"{rows} sequences of {server.max_model_len:,} tokens cannot fill {server.kv_tokens:,}")
    before, deadline = await server.metrics(), time.monotonic() + _FILL_SECONDS
    jobs = [
        asyncio.create_task(_hold(server, length, 1000 + number))
        for number in range(int(1.2 * server.kv_tokens / length) + 2)
    ]
    try:
        peak = await _peak(server, jobs, deadline)
    finally:
        for job in jobs:
            job.cancel()
        ends = await asyncio.gather(*jobs, return_exceptions=True)
    faults = [end for end in ends if isinstance(end, Exception)]
    if faults:
        raise Failed(f"{len(faults)} of {len(jobs)} requests failed: {faults[0]}")
    await server.wait_idle(20.0)
    after = await server.metrics()
    if after.get("engine_restarts_total", 0) > before.get("engine_restarts_total", 0):
        raise Failed(f"the engine was restarted while the pool was filled: {server.log_tail()}")
    if peak < _FULL and time.monotonic() >= deadline:
        raise Skipped(f"the pool was {peak:.0%} full after {_FILL_SECONDS:.0f} s, and nothing had failed")
    if peak < _FULL:
        raise Failed(f"only {peak:.0%} of the pool was in use with requests waiting")
    preempted = after.get("num_preemptions_total", 0) - before.get("num_preemptions_total", 0)
    host = after.get("engine_process_resident_memory_bytes", 0) / 2**30
    detail = (
        f"{peak:.0%} of {server.kv_tokens:,} tokens in use by requests of {length:,}, {preempted:.0f} "
        "preempted, none failed, all blocks free afterwards; the engine's process has "
        f"{host:.1f} GiB of host memory"
    )
    return Found(detail, {"peak": peak, "preemptions": preempted, "host_gib": host})


async def _prompt_speed(server: Server) -> float:
    """Tokens a second of one prompt, the faster of two."""
    length, best = max(16, min(4096, server.max_model_len // 2, server.kv_tokens // 4)), 0.0
    for seed in (9, 10):
        generator = random.Random(seed)
        tokens = [generator.randrange(_WORDS) for _ in range(length)]
        begin = time.perf_counter()
        await server.complete(prompt=tokens, max_tokens=1, temperature=0)
        best = max(best, length / (time.perf_counter() - begin))
    return best


async def _hold(server: Server, length: int, seed: int) -> None:
    """Runs until it is cancelled, or has had the model's longest answer."""
    generator = random.Random(seed)
    tokens = [generator.randrange(_WORDS) for _ in range(length)]
    body = {
        "prompt": tokens,
        "max_tokens": server.max_model_len - length,
        "ignore_eos": True,
        "temperature": 0,
    }
    async with server.stream("/v1/completions", body) as response:
        async for line in response.aiter_lines():
            if '"error"' in line and '"choices"' not in line:
                raise Failed(f"a request failed: {line[:200]}")


async def _peak(server: Server, jobs: list[asyncio.Task[None]], deadline: float) -> float:
    """Waits for a full pool; returns the largest share in use."""
    peak = 0.0
    while peak < 0.999 and time.monotonic() < deadline:
        found = await server.metrics()
        peak = max(peak, found.get("kv_cache_usage_perc", 0.0) / server.num_engines)
        if peak >= _FULL and found.get("num_requests_waiting", 0) > 0:
            break
        if all(job.done() for job in jobs):
            break
        await asyncio.sleep(0.05)
    return peak


async def check_kill(server: Server, context: Context) -> Found:
    """Kills the engine's process while a stream runs: it ends with an error, and the engine returns."""
    pids = server.engine_pids()
    if not pids:
        raise Skipped("the engine's process cannot be found on this system")
    expected = await server.complete(**_PROBE)
    begin = time.perf_counter()
    running = asyncio.create_task(_until_error(server))
    await asyncio.sleep(0.5)
    for pid in pids:  # all engines, if there are several
        os.kill(pid, signal.SIGKILL)
    said = await asyncio.wait_for(running, 60)
    noticed = time.perf_counter() - begin - 0.5
    while not _is_new(server.engine_pids(), pids) or not await server.is_healthy():
        if server.started.process.poll() is not None:
            raise Failed(f"the server ended with its engine: {server.log_tail()}")
        await asyncio.sleep(0.1)
    back = time.perf_counter() - begin - 0.5
    choice = await server.complete(**_PROBE)
    if choice["text"] != expected["text"]:
        raise Failed(
            f"the engine that returned answers {choice['text']!r}, before it was {expected['text']!r}"
        )
    await server.wait_idle(15.0)
    detail = f"the stream ended after {noticed:.1f} s ({said}), the engine was back after {back:.1f} s"
    return Found(detail, {"seconds_to_error": noticed, "seconds_to_return": back})


def _is_new(pids: list[int], before: list[int]) -> bool:
    return len(pids) >= len(before) and not set(pids) & set(before)


async def _until_error(server: Server) -> str:
    """Streams until the server reports an error; returns how it did."""
    limit = server.max_model_len - 64
    body = {"prompt": "Go on", "max_tokens": limit, "ignore_eos": True, "temperature": 0}
    try:
        async with server.stream("/v1/completions", body) as response:
            async for line in response.aiter_lines():
                if '"error"' in line and '"choices"' not in line:
                    return "an error event"
    except httpx2.HTTPError:
        return "its connection was closed"
    raise Failed("the stream ended without an error when its engine was killed")
