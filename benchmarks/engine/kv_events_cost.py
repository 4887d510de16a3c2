"""Measures KV events: CPU time of the engine's thread and of the publisher's, and bytes.

    python -m benchmarks.engine.kv_events_cost

The device of ``host_cost.py`` costs nothing. A subscriber in another process reads all events. "engine" is
the CPU time of the engine's thread per step, "publisher" the CPU time of the threads of the publisher and of
libzmq; on a GPU they overlap with the device. Rows that decode store a block of 16 tokens every 16 steps.
The last lines are a prefill of 8,192 tokens a step, with evictions: each block of 16 tokens that is stored
evicts another. All token ids are above 65,535, so that each takes the maximum of 5 bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Literal

from benchmarks.engine.host_cost import Done, NullExecutor
from chorale.config.kv_events import KvEventsConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits, GenerateRequest, SamplingSpec, StepPlan
from chorale.serve.engine.kv_events.publisher import KvEventPublisher

Mode = Literal["off", "full", "all"]
SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt(zmq.SUBSCRIBE, b"")
socket.connect(sys.argv[1])
print("on", flush=True)
while True:
    socket.recv_multipart()
"""


LARGE = 100_000  # a token id


class LargeIds(NullExecutor):
    def execute(self, plan: StepPlan) -> Done:
        done = super().execute(plan)
        done.answer.token_ids[:] = LARGE
        return done


def decode_core(rows: int, steps: int) -> EngineCore:
    limits = EngineLimits(
        num_blocks=rows * ((256 + steps + 64) // 16 + 12) * 2,
        block_size=16,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=256 + steps + 128,
        async_scheduling=True,
    )
    core = EngineCore(limits, LargeIds())
    for index in range(rows):
        ids = [index % 1000 + 10] * (256 + index % 16)
        core.add_request(
            GenerateRequest(request_id=str(index), prompt_token_ids=ids, sampling=SamplingSpec())
        )
    return core


def prefill_core(steps: int) -> EngineCore:
    """Returns an engine with prompts of 8,192 tokens, run one by one, and a pool for four of them."""
    limits = EngineLimits(
        num_blocks=4 * 2 * 8192 // 16,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        max_model_len=8200,
        async_scheduling=True,
    )
    core = EngineCore(limits, LargeIds())
    for index in range(steps + 32):
        ids = [index + LARGE] * 8191
        core.add_request(
            GenerateRequest(request_id=str(index), prompt_token_ids=ids, sampling=SamplingSpec(max_tokens=1))
        )
    return core


def measure(make: Callable[[], EngineCore], steps: int, warm: int, mode: Mode) -> tuple[float, float, float]:
    """Returns, per step, the microseconds of the engine's thread and of all others, and the bytes sent."""
    with tempfile.TemporaryDirectory() as folder:
        core, publisher, reader = make(), None, None
        if mode != "off":
            config = KvEventsConfig(
                enable_kv_cache_events=True, endpoint=f"ipc://{folder}/x", groups=mode, buffer_steps=10**6
            )
            publisher = KvEventPublisher(config)
            reader = subprocess.Popen(
                [sys.executable, "-c", SUBSCRIBER, config.endpoint], stdout=subprocess.PIPE, text=True
            )
            assert reader.stdout is not None
            reader.stdout.readline()
            time.sleep(0.2)
            publisher.start(core)
        try:
            return _run(core, publisher, steps, warm)
        finally:
            if publisher is not None and reader is not None:
                publisher.close()
                reader.kill()
                reader.wait()
                reader.communicate()


def _run(
    core: EngineCore, publisher: KvEventPublisher | None, steps: int, warm: int
) -> tuple[float, float, float]:
    def step() -> None:
        core.step()
        if publisher is not None:
            publisher.collect()

    for _ in range(warm):
        step()
    time.sleep(0.3)
    before = publisher._kept_bytes if publisher is not None else 0
    everything, own = time.process_time(), time.thread_time()
    for _ in range(steps):
        step()
    own = time.thread_time() - own
    while publisher is not None and publisher._pending:
        time.sleep(0.01)
    time.sleep(0.05)
    others = time.process_time() - everything - own
    sent = publisher._kept_bytes - before if publisher is not None else 0
    return own / steps * 1e6, others / steps * 1e6, sent / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print("step                     groups  engine us  publisher us  bytes a step  bytes/s at 100 steps/s")
    cases: tuple[tuple[str, Callable[[], EngineCore], int, int], ...] = (
        (f"decode, {options.rows} rows", lambda: decode_core(options.rows, options.steps), options.steps, 48),
        ("prefill, 8,192 tokens", lambda: prefill_core(100), 100, 16),
    )
    for title, make, steps, warm in cases:
        for mode in ("off", "full", "all"):
            runs = [measure(make, steps, warm, mode) for _ in range(options.repeat)]
            own, others, sent = (min(column) for column in zip(*runs, strict=True))
            print(f"{title:<24} {mode:>6}  {own:9.0f}  {others:12.0f}  {sent:12.0f}  {sent * 100:12,.0f}")


if __name__ == "__main__":
    main()
