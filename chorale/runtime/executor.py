"""LocalExecutor: the Executor of one rank in this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from chorale.engine.commands import TRANSFERS, Command
from chorale.engine.types import FetchResult, StepPlan, StepResult
from chorale.errors import ChoraleError, EngineError
from chorale.runtime.gpu_faults import explain
from chorale.runtime.profiler import TorchProfiler
from chorale.runtime.rank_memory import RankMemory
from chorale.runtime.worker import Worker


class LocalExecutor:
    """Passes plans to the worker. When ``execute`` returns, the step has run (CPU) or is enqueued (GPU)."""

    def __init__(
        self,
        worker: Worker,
        memory: RankMemory | None = None,
        profiler: TorchProfiler | None = None,
    ) -> None:
        """``memory`` and ``profiler``: required for ``control``."""
        self._worker: Worker | None = worker
        self._memory, self._profiler = memory, profiler
        self._later: deque[Callable[[Worker], None]] = deque()
        self._timer = StepTimer(overlaps=worker.device.overlap)
        self._gpu = worker.device.hardware.label

    def execute(self, plan: StepPlan) -> FetchResult:
        """Start a step. Never raises: the returned function raises errors."""
        began = time.perf_counter()
        try:
            fetch = self._timer.timed(self.worker.run(plan), began)
        except Exception as error:
            fetch = _raising(error)
        step_id, gpu = plan.step_id, self._gpu

        def result() -> StepResult:
            try:
                return fetch()
            except Exception as error:
                _raise(error, f"step {step_id} failed", gpu)

        return result

    def later(self, action: Callable[[Worker], None]) -> None:
        """Queue an action for ``use_idle_time``."""
        self._later.append(action)

    def use_idle_time(self) -> bool:
        if not self._later or self._worker is None:
            return False
        self.prepare(self._later.popleft())
        return True

    def prepare(self, action: Callable[[Worker], None]) -> None:
        """Run an action now. Raises ``EngineError``."""
        worker = self.worker
        try:
            action(worker)
        except Exception as error:
            _raise(error, "a step could not be prepared", self._gpu)

    def control(self, command: Command) -> str:
        """Release or restore the device's memory, profile, or update weights. No step is in flight.

        Returns why the command of a weight transfer was refused, or "". Raises ``EngineError``."""
        try:
            if self._memory is not None and command.action in TRANSFERS:
                return self._memory.transfer(command)
            if command.action == "sleep" and self._memory is not None:
                self._worker = None
                self._later.clear()
                self._memory.release(command.level)
            elif command.action == "wake_up" and self._memory is not None:
                self._worker = self._memory.restore(command.tags)
            elif command.action == "start_profile" and self._profiler is not None:
                self._profiler.start()
            elif command.action == "stop_profile" and self._profiler is not None:
                self._profiler.stop()
        except Exception as error:
            _raise(error, f"{command.action} failed", self._gpu)
        return ""

    @property
    def worker(self) -> Worker:
        """The worker, to run it without this executor. Raises ``EngineError`` if there is none."""
        if self._worker is None:
            raise EngineError("the executor was shut down")
        return self._worker

    def shutdown(self) -> None:
        """Release the device's memory. Results of executed steps can still be read."""
        self._worker = self._memory = None


class StepTimer:
    """Measures how long the device works on each step."""

    def __init__(self, *, overlaps: bool) -> None:
        self._overlaps = overlaps
        self._finished = 0.0  # time at which the previous step finished

    def timed(self, fetch: FetchResult, began: float) -> FetchResult:
        """Wrap ``fetch`` to add the step's seconds. The host launched the step between ``began`` and now.

        Steps run one after the other: a step launched while another runs begins when that one ends.
        """
        launched = time.perf_counter()

        def result() -> StepResult:
            found = fetch()
            if not self._overlaps:
                return replace(found, seconds=launched - began)
            before, self._finished = self._finished, time.perf_counter()
            return replace(found, seconds=self._finished - max(began, before))

        return result


def _raise(error: Exception, doing: str, gpu: str) -> NoReturn:
    """Raises ``error`` as a ``ChoraleError``; an error of a GPU names the GPU."""
    found = explain(error, doing, gpu)
    if found is None and isinstance(error, ChoraleError):
        raise error
    raise found or EngineError(f"{doing} ({type(error).__name__}: {error})") from error


def _raising(error: Exception) -> FetchResult:
    def fetch() -> StepResult:
        raise error

    return fetch
