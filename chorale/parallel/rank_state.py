"""RankState: the signs of life of one rank, when it counts as lost, and which of several broke first."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from chorale.errors import ConfigError, EngineError, GpuError
from chorale.parallel.channel import Channel
from chorale.parallel.wire import Beat, Failed, FromRank, Opened, Ready

SILENT_SECONDS = 5.0  # without a beat, while serving: a rank that hangs; as of the engine process itself
LOADING_SILENT_SECONDS = 120.0  # importing torch from a cold disk holds the interpreter's lock for long
STOPPED_SECONDS = 1.0  # without a beat, if the system says that the process is stopped
# Of a rank's own part of one step: enqueuing on a GPU, computing on a CPU. Less than the engine monitor's
# limits for a whole step, which name no rank (``watch.WatchLimits.step_limit``).
BUSY_SECONDS = {"cpu": 500.0, "cuda": 25.0}


@dataclass(frozen=True, slots=True)
class Loss:
    """The reason why the engine cannot go on. ``reason``: as of ``Failed``; "ended" if the rank said none."""

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
    heard_at: float
    busy: float = 0.0  # as its last beat says
    opened: Opened | None = None
    is_ready: bool = False
    failed: Failed | None = None
    trouble: str = ""  # why it counts as lost
    is_open: bool = True

    def hear(self, message: FromRank, now: float) -> None:
        self.heard_at = now
        if isinstance(message, Opened):
            self.opened = message
        elif isinstance(message, Ready):
            self.is_ready = True
        elif isinstance(message, Failed):
            self.failed = message
        elif isinstance(message, Beat):
            self.busy = message.busy

    def judge(self, now: float) -> None:
        """Sets ``trouble`` if the rank has failed, ended or hangs."""
        if self.trouble:
            return
        code, silence = self.process.poll(), now - self.heard_at
        limit = SILENT_SECONDS if self.is_ready else LOADING_SILENT_SECONDS
        if self.failed is not None:
            self.trouble = f"failed: {self.failed.message}"
        elif code is not None:
            self.trouble = _manner(code)
        elif silence > limit:
            self.trouble = f"hangs: it has been silent for {silence:.1f} s"
        elif self.opened is not None and self.busy > BUSY_SECONDS.get(self.opened.kind, 25.0):
            self.trouble = f"hangs: its part of one step has been running for {self.busy:.1f} s"
        elif silence > STOPPED_SECONDS and _is_stopped(self.process.pid):
            self.trouble = "hangs: it was stopped by a signal"


def first_loss(ranks: Iterable[RankState]) -> Loss:
    """Returns the loss of the rank that broke first, of those in trouble."""
    first = min((each for each in ranks if each.trouble), key=_blame)
    if first.failed is None:
        return Loss(f"rank {first.rank} (process {first.process.pid}) {first.trouble}")
    reason = first.failed.reason
    if reason == "config":
        return Loss(f"rank {first.rank}: {first.failed.message}", reason)
    return Loss(f"rank {first.rank} (process {first.process.pid}) {first.trouble}", reason)


def _blame(each: RankState) -> int:
    """Lower: more probably the first to break. A rank whose exchange failed reports it; one that was killed
    reports nothing; and a GPU's hardware does not fail because of another rank."""
    if each.failed is None:
        return 1
    return {"gpu": 0, "exchange": 3}.get(each.failed.reason, 2)


def _manner(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False  # not Linux: silence tells
    return state in "Tt"
