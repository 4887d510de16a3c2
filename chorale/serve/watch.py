"""Decides whether an engine process hangs, and whether to restart it. Starts no processes itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from chorale.client.wire.messages import Heartbeat
from chorale.machine.processes import LOADING_TIMEOUT, Pulse


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Limits of the engine monitor; times are seconds. The defaults are for serving; tests shorten them."""

    heartbeat_timeout: float | None = None  # limit of silence while serving; None: as in the configuration
    most_doublings: int = 3  # each kill of a hung process doubles the heartbeat timeout, up to this often
    step_timeout: float | None = None  # None: 30 s on an accelerator, 600 s on a CPU (a long prefill chunk)
    step_p99_factor: float = 20.0
    max_failed_starts: int = 5  # give up after this many crashes of processes that were never ready
    # Give up after this many crashes of any kind. A request that is sent again may crash every engine.
    max_deaths: int = 20
    deaths_window: float = 300.0  # period in which failed starts and deaths are counted
    # Give up after this many GPU hardware faults. A restart often helps: the driver then avoids bad memory.
    max_gpu_faults: int = 3
    gpu_faults_window: float = 3600.0  # period in which GPU faults are counted
    backoff: float = 0.1  # delay of the first restart; doubles with each failed start or hang in the window
    max_backoff: float = 10.0
    kill_grace: float = 5.0  # time from SIGTERM to SIGKILL
    dump_grace: float = 0.5  # time from the stack dump of a hung engine to SIGKILL

    def step_limit(self, beat: Heartbeat, silence: float) -> float:
        """Returns for how many seconds a step may run. ``silence``: the limit of silence while serving."""
        floor = self.step_timeout
        if floor is None:
            on_cpu = beat.info is None or beat.info.device.lower().startswith("cpu") or bool(beat.task)
            floor = max(600.0 if on_cpu else 30.0, silence)
        return max(floor, self.step_p99_factor * beat.p99_step_seconds)


class EnginePulse:
    """Tracks the heartbeats of one engine process. ``timeout``: its heartbeat timeout while serving."""

    def __init__(self, limits: WatchLimits, timeout: float, pid: int | None, now: float) -> None:
        self._limits, self._timeout = limits, timeout
        self._pulse = Pulse(pid, now)
        self._beat: Heartbeat | None = None

    def hear(self, beat: Heartbeat, now: float) -> None:
        self._beat = beat
        self._pulse.hear(now, beat.step_seconds)

    def hang_reason(self, now: float) -> str | None:
        """Returns why the process counts as hung, or None if it does not."""
        beat, pulse = self._beat, self._pulse
        task = "" if beat is None else beat.task
        loading = beat is None or beat.state == "loading" or bool(task)
        if pulse.is_silent(now, LOADING_TIMEOUT if loading else self._timeout):
            return f"no heartbeat for {pulse.silence.seconds:.1f} s"
        if beat is not None and pulse.is_stuck(now, self._limits.step_limit(beat, self._timeout)):
            return f"one step has been running for {beat.step_seconds:.1f} s"
        return None


@dataclass(slots=True)
class RestartPolicy:
    """Decides whether to restart a crashed process, by the number of crashes in the window.

    Few failed starts are allowed, as a process that never becomes ready would be restarted forever. More
    crashes are allowed after a successful start: ten kills in ten minutes must not end a server.
    """

    limits: WatchLimits
    # Each entry: time, whether the start failed, whether the process hung.
    _deaths: deque[tuple[float, bool, bool]] = field(default_factory=deque)
    _gpu_faults: deque[float] = field(default_factory=deque)

    def add(
        self, now: float, *, was_ready: bool, is_gpu: bool = False, is_hang: bool = False
    ) -> float | None:
        """Counts a crash. Returns the seconds to wait before a restart, or None for no restart.

        ``is_gpu``: the GPU hardware failed. ``is_hang``: the process was killed because it seemed to hang.
        """
        limits, deaths = self.limits, self._deaths
        if is_gpu:
            self._gpu_faults.append(now)
            while now - self._gpu_faults[0] > limits.gpu_faults_window:
                self._gpu_faults.popleft()
            if len(self._gpu_faults) >= limits.max_gpu_faults:
                return None
        deaths.append((now, not was_ready, is_hang))
        while now - deaths[0][0] > limits.deaths_window:
            deaths.popleft()
        failed_starts = sum(failed for _, failed, _ in deaths)
        if failed_starts >= limits.max_failed_starts or len(deaths) >= limits.max_deaths:
            return None
        doubtful = sum(failed or hung for _, failed, hung in deaths)
        return min(limits.backoff * 2.0 ** max(doubtful - 1, 0), limits.max_backoff)

    def growth(self, now: float) -> float:
        """Returns the factor for the heartbeat timeout: it doubles with each hung process in the window."""
        hangs = sum(hung and now - time <= self.limits.deaths_window for time, _, hung in self._deaths)
        return 2.0 ** min(hangs, self.limits.most_doublings)
