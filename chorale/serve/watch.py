"""Decides when an engine process hangs and when it has crashed too often. Starts no processes itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from chorale.client.wire.messages import Heartbeat
from chorale.machine.processes import LOADING_TIMEOUT, Pulse


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Limits of the engine monitor, times in seconds. The defaults are for serving; tests shorten them."""

    heartbeat_timeout: float | None = None  # no beat while serving; None: the engine's configuration has it
    most_doublings: int = 3  # of this limit, one for each kill of a process that hung
    step_timeout: float | None = None  # None: 30 s on an accelerator, 600 s on a CPU (a long prefill chunk)
    step_p99_factor: float = 20.0
    max_failed_starts: int = (
        5  # crashes of processes that were never ready, after which a restart would not help
    )
    max_deaths: int = (
        20  # of any kind: something crashes every engine, for example a request that is sent again
    )
    deaths_window: float = 300.0  # window in which both are counted
    max_gpu_faults: int = 3  # of the hardware: a restart often succeeds, because the driver avoids bad memory
    gpu_faults_window: float = 3600.0
    backoff: float = 0.1  # before the first restart; doubles with each failed start or hang in the window
    max_backoff: float = 10.0
    kill_grace: float = 5.0  # from SIGTERM to SIGKILL
    dump_grace: float = 0.5  # from the stack dump of a hung engine to SIGKILL

    def step_limit(self, beat: Heartbeat) -> float:
        """Returns the seconds that the current step may run."""
        floor = self.step_timeout
        if floor is None:
            on_cpu = beat.info is None or beat.info.device.lower().startswith("cpu")
            floor = 600.0 if on_cpu else 30.0
        return max(floor, self.step_p99_factor * beat.p99_step_seconds)


class EnginePulse:
    """The heartbeats of one engine process. ``timeout``: its limit while it serves."""

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
        loading = beat is None or beat.state == "loading"
        if pulse.is_silent(now, LOADING_TIMEOUT if loading else self._timeout):
            return f"no heartbeat for {pulse.silence.seconds:.1f} s"
        if beat is not None and pulse.is_stuck(now, self._limits.step_limit(beat)):
            return f"one step has been running for {beat.step_seconds:.1f} s"
        return None


@dataclass(slots=True)
class RestartPolicy:
    """Decides between a restart and giving up, by the crashes in the window.

    A process that never becomes ready would otherwise be restarted forever. One that was ready can start: ten
    kills in as many minutes do not end a server that recovers from each.
    """

    limits: WatchLimits
    # Time; whether the start failed; whether it hung.
    _deaths: deque[tuple[float, bool, bool]] = field(default_factory=deque)
    _gpu_faults: deque[float] = field(default_factory=deque)

    def add(
        self, now: float, *, was_ready: bool, is_gpu: bool = False, is_hang: bool = False
    ) -> float | None:
        """Counts a crash. Returns the seconds to wait before a restart, or None for no restart.

        ``is_gpu``: the GPU's hardware failed. ``is_hang``: it was killed because it seemed to hang.
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
        """Returns the factor of the limit of silence: it doubles with each kill for hanging in the window."""
        hangs = sum(hung and now - time <= self.limits.deaths_window for time, _, hung in self._deaths)
        return 2.0 ** min(hangs, self.limits.most_doublings)
