"""RankState: one rank's heartbeats, when it counts as lost, and which rank broke first."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from chorale.errors import AdapterError, ConfigError, EngineError, GpuError
from chorale.machine.hardware import Hardware
from chorale.machine.processes import LOADING_TIMEOUT, Pulse, how_ended
from chorale.parallel.channel import Channel
from chorale.parallel.wire import Adapted, Beat, Failed, FromRank, Opened, Ready

# Maximum for a rank's own part of a step: enqueuing on a GPU, computing on a CPU. Less than the engine
# monitor's limits for a whole step, whose errors name no rank (``watch.WatchLimits.step_limit``).
BUSY_SECONDS = {"cpu": 500.0, "cuda": 25.0}


@dataclass(frozen=True, slots=True)
class Loss:
    """The reason why the engine cannot continue. ``reason``: as in ``Failed``; "ended" if the rank gave
    none."""

    message: str
    reason: str = "ended"

    def error(self) -> ConfigError | EngineError:
        if self.reason == "config":  # a restart would not help
            return ConfigError(self.message)
        return GpuError(self.message) if self.reason == "gpu" else EngineError(self.message)


@dataclass(slots=True)
class RankState:
    """One rank, as the engine process sees it. Written by the thread that watches the ranks."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    pulse: Pulse
    # Seconds of silence while serving after which it counts as hanging; the same as for the engine.
    timeout: float
    hardware: Hardware | None = None  # once it has opened its device
    is_ready: bool = False
    refusal: str = ""  # of its last ``Ready``
    failed: Failed | None = None
    trouble: str = ""  # why it counts as lost, for messages
    is_open: bool = True
    adapted: deque[Future[None]] = field(default_factory=deque)  # for its next answers to ``Adapt``

    def hear(self, message: FromRank, now: float) -> None:
        self.pulse.hear(now, message.busy if isinstance(message, Beat) else 0.0)
        if isinstance(message, Opened):
            self.hardware = message.hardware
        elif isinstance(message, Ready):
            self.is_ready, self.refusal = True, message.refusal
        elif isinstance(message, Adapted):
            future = self.adapted.popleft()
            future.set_exception(AdapterError(message.fault)) if message.fault else future.set_result(None)
        elif isinstance(message, Failed):
            self.failed = message

    def judge(self, now: float) -> None:
        """Set ``trouble`` if the rank has failed, ended or hangs."""
        if self.trouble:
            return
        code, pulse = self.process.poll(), self.pulse
        if self.failed is not None:
            self.trouble = f"failed: {self.failed.message}"
        elif code is not None:
            self.trouble = how_ended(code)
        elif pulse.is_silent(now, self.timeout if self.is_ready else LOADING_TIMEOUT):
            self.trouble = f"hangs: it has been silent for {pulse.silence.seconds:.1f} s"
        elif self.hardware is not None and pulse.is_stuck(now, BUSY_SECONDS.get(self.hardware.kind, 25.0)):
            self.trouble = f"hangs: its part of one step has been running for {pulse.busy:.1f} s"


def first_loss(ranks: Iterable[RankState]) -> Loss:
    """Return the loss of the rank that broke first, among those in trouble."""
    first = min((each for each in ranks if each.trouble), key=_blame)
    if first.failed is None:
        return Loss(f"rank {first.rank} (process {first.process.pid}) {first.trouble}")
    reason = first.failed.reason
    if reason == "config":
        return Loss(f"rank {first.rank}: {first.failed.message}", reason)
    return Loss(f"rank {first.rank} (process {first.process.pid}) {first.trouble}", reason)


def _blame(each: RankState) -> int:
    """Sort key: lower means more likely the first to break. A rank whose exchange failed reports it; a killed
    rank reports nothing; and a GPU's hardware does not fail because of another rank."""
    if each.failed is None:
        return 1
    return {"gpu": 0, "exchange": 3}.get(each.failed.reason, 2)
