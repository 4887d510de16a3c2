"""The engine process as the product runs it, around the real scheduler and a fake device.

Tests run it as a script in place of ``python -m chorale.serve.engine.process``, and pass its behaviour in
``EngineConfig.model`` (``Behaviour.encode``).
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import sys
import time
from functools import partial

import msgspec

from chorale.client.base import EngineInfo
from chorale.config.engine import EngineConfig
from chorale.engine.commands import Command, DeviceControl
from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits, FetchResult, StepPlan, StepResult
from chorale.errors import ConfigError
from chorale.runtime.gpu_faults import explain
from chorale.runtime.progress import Progress
from chorale.serve.bootstrap import EngineStart, read_start
from chorale.serve.engine.process import run_engine_process
from tests.support.engine.fake_executor import FakeExecutor, FakeModel

LIMITS = EngineLimits(
    num_blocks=8192, block_size=16, max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=65536
)
MODEL = FakeModel(stop_probability=0.0)


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    step_seconds: float = 0.0
    load_seconds: float = 0.0
    fail_at_step: int | None = None
    ecc_at_step: int | None = None  # the step that fails with an uncorrectable memory error of a GPU
    hold: str | None = None  # the first step keeps the interpreter lock: "asleep", "spinning" or "busy"
    device: str = "cpu"
    missing_once_ready: bool = False  # a restart finds no device
    refuse: str | None = None  # message of a ConfigError while loading
    crash: str | None = None  # message of any other error while loading
    faulty: str | None = None  # name of the replica that refuses or crashes; None: every engine
    # A sleep or wake-up keeps the interpreter lock for so long. None: the engine cannot sleep.
    task_seconds: float | None = None
    max_num_seqs: int = 256
    num_blocks: int = LIMITS.num_blocks

    def encode(self) -> EngineConfig:
        return EngineConfig(model=msgspec.json.encode(self).decode())


PLACE = "GPU 3 (NVIDIA H200, GPU-1a2b, 00000000:1b:00.0)"
ECC = (
    "CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions."
)


class FaultyExecutor(FakeExecutor):
    ecc_at_step: int | None = None
    hold: str | None = None

    def execute(self, plan: StepPlan) -> FetchResult:
        if self.hold is not None:
            keep_lock(self.hold)
            self.hold = None
        handle = super().execute(plan)
        return handle if plan.step_id != self.ecc_at_step else EccStep()


class FakeDevice(DeviceControl):
    """A device that takes time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def why_not(self, command: Command) -> str | None:
        return None

    def execute(self, command: Command) -> None:
        ctypes.PyDLL(None).usleep(round(self._seconds * 1e6))


def keep_lock(manner: str) -> None:
    """Keeps every other thread from running: for ever, or for about half a second on a processor ("busy")."""
    if manner == "asleep":
        while True:
            ctypes.PyDLL(None).sleep(1000)  # a signal ends it
    else:
        sum(itertools.repeat(1, 10**8 if manner == "busy" else 10**13))


class EccStep:
    """The result of a step that fails with an error of CUDA."""

    def __call__(self) -> StepResult:
        error = explain(RuntimeError(ECC), "step 2 failed", PLACE)
        assert error is not None
        raise error


def build(
    config: EngineConfig, progress: Progress, prefix_secret: bytes = b"", name: str = "engine"
) -> tuple[EngineCore, EngineInfo]:
    behaviour = msgspec.json.decode(config.model, type=Behaviour)
    progress("load", 0.5, "half of it")
    time.sleep(behaviour.load_seconds)
    if behaviour.faulty in (None, name):
        if behaviour.missing_once_ready and config.device != "auto":
            kind = config.device
            raise ConfigError(f"--device {kind}: PyTorch finds no {kind.upper()} device here")
        if behaviour.refuse is not None:
            raise ConfigError(behaviour.refuse)
        if behaviour.crash is not None:
            raise RuntimeError(behaviour.crash)
    limits = dataclasses.replace(LIMITS, num_blocks=behaviour.num_blocks, max_num_seqs=behaviour.max_num_seqs)
    executor = FaultyExecutor(
        limits, MODEL, step_seconds=behaviour.step_seconds, fail_at_step=behaviour.fail_at_step
    )
    executor.ecc_at_step, executor.hold = behaviour.ecc_at_step, behaviour.hold
    info = EngineInfo(
        model="fake",
        max_model_len=LIMITS.max_model_len,
        max_num_seqs=behaviour.max_num_seqs,
        device=behaviour.device,
    )
    device = None if behaviour.task_seconds is None else FakeDevice(behaviour.task_seconds)
    return EngineCore(limits, executor, prefix_secret=prefix_secret, device=device), info


if __name__ == "__main__":
    start = read_start(sys.stdin.buffer, EngineStart)
    sys.exit(run_engine_process(start, partial(build, prefix_secret=start.prefix_secret, name=start.name)))
