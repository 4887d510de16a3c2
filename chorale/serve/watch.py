"""When is an engine process hung, and when has it died too often? Decisions only, no processes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from chorale.client.wire import Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Seconds, counts and factors of the watch. The defaults are for serving; tests shorten them."""

    beat_timeout: float = 5.0  # no beat while serving: the process is stopped, or never gives up its lock
    loading_beat_timeout: float = 120.0  # importing torch from a cold disk holds the lock for long
    step_timeout: float | None = None  # None: 30 s on an accelerator, 600 s on a CPU (a long prefill chunk)
    step_p99_factor: float = 20.0
    max_deaths: int = 5
    deaths_window: float = 300.0
    backoff: float = 0.1  # before the first restart; doubles with each death in the window
    max_backoff: float = 10.0
    kill_grace: float = 5.0  # from SIGTERM to SIGKILL
    dump_grace: float = 0.5  # from the stack dump of a hung engine to SIGKILL

    def step_limit(self, beat: Beat) -> float:
        """How long the current step may run."""
        floor = self.step_timeout
        if floor is None:
            on_cpu = beat.info is None or beat.info.device.lower().startswith("cpu")
            floor = 600.0 if on_cpu else 30.0
        return max(floor, self.step_p99_factor * beat.p99_step_seconds)


@dataclass(slots=True)
class Pulse:
    """The last beat of one engine process, and when it came (monotonic seconds)."""

    limits: WatchLimits
    heard_at: float
    beat: Beat | None = None

    def hear(self, beat: Beat, now: float) -> None:
        self.beat, self.heard_at = beat, now

    def complaint(self, now: float) -> str | None:
        """Why the process counts as hung; None while it is well."""
        beat, silence = self.beat, now - self.heard_at
        loading = beat is None or beat.state == "loading"
        limit = self.limits.loading_beat_timeout if loading else self.limits.beat_timeout
        if silence > limit:
            return f"no heartbeat for {silence:.1f} s"
        if beat is not None and beat.step_seconds > self.limits.step_limit(beat):
            return f"one step has been running for {beat.step_seconds:.1f} s"
        return None


@dataclass(slots=True)
class Deaths:
    """The deaths in the window; decides between a restart and giving up."""

    limits: WatchLimits
    _times: deque[float] = field(default_factory=deque)

    def add(self, now: float) -> float | None:
        """Count a death. Returns the seconds to wait before a restart, or None: no restart."""
        self._times.append(now)
        while now - self._times[0] > self.limits.deaths_window:
            self._times.popleft()
        if len(self._times) >= self.limits.max_deaths:
            return None
        return min(self.limits.backoff * float(2 ** (len(self._times) - 1)), self.limits.max_backoff)
