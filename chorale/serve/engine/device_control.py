"""EngineDevice: the ``DeviceControl`` of an engine, over the executor of all its ranks."""

from __future__ import annotations

from chorale.config.engine import EngineConfig
from chorale.engine.commands import MEMORY, PROFILER_IS_OFF, SLEEP_IS_OFF, UPDATES, Command, DeviceControl
from chorale.errors import ConflictError
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sizing.resolve import Resolved
from chorale.runtime.warmup.captures import capture_first, warm_up


class EngineDevice(DeviceControl):
    """Sleeps, wakes up and profiles."""

    def __init__(self, config: EngineConfig, executor: LocalExecutor, resolved: Resolved) -> None:
        self._config, self._executor, self._resolved = config, executor, resolved
        self._is_profiling = False
        self._missing: set[str] = set()  # released memory

    def why_not(self, command: Command) -> str | None:
        """See ``DeviceControl``. A running profile ends before the memory is released."""
        starts = command.action == "start_profile"
        if starts or command.action == "stop_profile":
            if self._config.profiler_config is None:
                return PROFILER_IS_OFF
            if starts is self._is_profiling:
                return "the profiler runs already" if starts else "the profiler does not run"
        if command.action == "sleep" and command.level:
            if not self._config.enable_sleep_mode:
                return SLEEP_IS_OFF
            if self._is_profiling:
                return "the profiler runs; stop it first"
        return None

    def execute(self, command: Command) -> None:
        """See ``DeviceControl``. After a wake-up, the first step runs and the first graphs are captured; the
        others when the engine is idle."""
        executor, resolved = self._executor, self._resolved
        refusal = executor.control(command)
        if refusal:
            if command.action in UPDATES:
                executor.control(Command(action="abandon_weight_update"))  # on the ranks that did not refuse
            raise ConflictError(refusal)
        if command.action == "sleep":
            self._missing = set(MEMORY)
        elif command.action == "wake_up":
            self._missing.difference_update(command.tags)
            if not self._missing:
                warm_up(executor, resolved)
                if resolved.graph_rows:
                    capture_first(executor, resolved, lambda *_: None, budget=0)
        elif command.action in ("start_profile", "stop_profile"):
            self._is_profiling = command.action == "start_profile"
