"""Decides when an engine process hangs and when it has crashed too often. Starts no processes itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from chorale.client.wire import Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Limits of the engine monitor, times in seconds. The defaults are for serving; tests shorten them."""

    heartbeat_timeout: float = 5.0  # no beat while serving: the process is stopped, or holds the GIL
    loading_heartbeat_timeout: float = 120.0  # importing torch from a cold disk holds the GIL for long
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
    backoff: float = 0.1  # before the first restart; doubles with each failed start in the window
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


@dataclass(slots=True)
class LastHeartbeat:
    """The last heartbeat of one engine process, and its monotonic time."""

    limits: WatchLimits
    heard_at: float
    beat: Heartbeat | None = None

    def hear(self, beat: Heartbeat, now: float) -> None:
        self.beat, self.heard_at = beat, now

    def hang_reason(self, now: float) -> str | None:
        """Returns why the process counts as hung, or None if it does not."""
        beat, silence = self.beat, now - self.heard_at
        loading = beat is None or beat.state == "loading"
        limit = self.limits.loading_heartbeat_timeout if loading else self.limits.heartbeat_timeout
        if silence > limit:
            return f"no heartbeat for {silence:.1f} s"
        if beat is not None and beat.step_seconds > self.limits.step_limit(beat):
            return f"one step has been running for {beat.step_seconds:.1f} s"
        return None


@dataclass(slots=True)
class RestartPolicy:
    """Decides between a restart and giving up, by the crashes in the window.

    A process that never becomes ready would otherwise be restarted forever. One that was ready can start: ten
    kills in as many minutes do not end a server that recovers from each.
    """

    limits: WatchLimits
    _deaths: deque[tuple[float, bool]] = field(default_factory=deque)  # time; whether it was ready
    _gpu_faults: deque[float] = field(default_factory=deque)

    def add(self, now: float, *, was_ready: bool, is_gpu: bool = False) -> float | None:
        """Counts a crash. Returns the seconds to wait before a restart, or None for no restart.

        ``is_gpu``: the GPU's hardware failed.
        """
        limits, deaths = self.limits, self._deaths
        if is_gpu:
            self._gpu_faults.append(now)
            while now - self._gpu_faults[0] > limits.gpu_faults_window:
                self._gpu_faults.popleft()
            if len(self._gpu_faults) >= limits.max_gpu_faults:
                return None
        deaths.append((now, was_ready))
        while now - deaths[0][0] > limits.deaths_window:
            deaths.popleft()
        failed_starts = sum(not ready for _, ready in deaths)
        if failed_starts >= limits.max_failed_starts or len(deaths) >= limits.max_deaths:
            return None
        return min(limits.backoff * 2.0 ** max(failed_starts - 1, 0), limits.max_backoff)
