"""The engine process as the product runs it, around the real scheduler and a fake device.

Run as a script by the tests, in place of ``python -m chorale.serve.engine.process``. How it should behave is
written by the test into ``EngineConfig.model``, as ``Behaviour.encode`` does.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from functools import partial

import msgspec

from chorale.client.base import EngineInfo
from chorale.config import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits
from chorale.errors import ConfigError
from chorale.runtime.progress import Progress
from chorale.serve.bootstrap import EngineStart, read_start
from chorale.serve.engine.process import run_engine_process
from chorale.testing.fake_executor import FakeExecutor, FakeModel

LIMITS = EngineLimits(
    num_blocks=8192, block_size=16, max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=65536
)
MODEL = FakeModel(stop_probability=0.0)


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    step_seconds: float = 0.0
    load_seconds: float = 0.0
    fail_at_step: int | None = None
    refuse: str | None = None  # a ConfigError with this message
    crash: str | None = None  # any other error while loading
    faulty: str | None = None  # name of the replica that refuses or crashes; None: every engine
    max_num_seqs: int = 256
    num_blocks: int = LIMITS.num_blocks

    def encode(self) -> EngineConfig:
        return EngineConfig(model=msgspec.json.encode(self).decode())


def build(
    config: EngineConfig, progress: Progress, prefix_secret: bytes = b"", name: str = "engine"
) -> tuple[EngineCore, EngineInfo]:
    behaviour = msgspec.json.decode(config.model, type=Behaviour)
    progress("load", 0.5, "half of it")
    time.sleep(behaviour.load_seconds)
    if behaviour.faulty in (None, name):
        if behaviour.refuse is not None:
            raise ConfigError(behaviour.refuse)
        if behaviour.crash is not None:
            raise RuntimeError(behaviour.crash)
    limits = dataclasses.replace(LIMITS, num_blocks=behaviour.num_blocks)
    executor = FakeExecutor(
        limits, MODEL, step_seconds=behaviour.step_seconds, fail_at_step=behaviour.fail_at_step
    )
    info = EngineInfo(
        model="fake", max_model_len=LIMITS.max_model_len, max_num_seqs=behaviour.max_num_seqs, device="cpu"
    )
    return EngineCore(limits, executor, prefix_secret=prefix_secret), info


if __name__ == "__main__":
    start = read_start(sys.stdin.buffer, EngineStart)
    sys.exit(run_engine_process(start, partial(build, prefix_secret=start.prefix_secret, name=start.name)))
