"""LocalExecutor: the Executor of one rank in this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from chorale.engine.types import StepHandle, StepPlan, StepResult
from chorale.errors import ChoraleError, EngineError
from chorale.runtime.worker import Worker


class LocalExecutor:
    """``execute`` hands a plan to the worker. On a CPU the step has then run; on a GPU it is enqueued."""

    def __init__(self, worker: Worker, *, overlaps: bool = False) -> None:
        """``overlaps``: the device still computes when ``execute`` has returned."""
        self._worker: Worker | None = worker
        self._later: deque[Callable[[Worker], None]] = deque()
        self._timer = StepTimer(overlaps=overlaps)

    def execute(self, plan: StepPlan) -> StepHandle:
        """Never raises: whatever goes wrong is raised by the handle's ``result``."""
        if self._worker is None:
            return LocalStep(plan.step_id, _shut_down)
        began = time.perf_counter()
        try:
            fetch = self._worker.run(plan)
        except Exception as error:  # any fault of the device or the model fails this step, and is not lost
            return LocalStep(plan.step_id, _raising(error))
        return LocalStep(plan.step_id, self._timer.timed(fetch, began))

    def later(self, action: Callable[[Worker], None]) -> None:
        """Something for ``use_idle_time``."""
        self._later.append(action)

    def use_idle_time(self) -> bool:
        if not self._later or self._worker is None:
            return False
        self.prepare(self._later.popleft())
        return True

    def prepare(self, action: Callable[[Worker], None]) -> None:
        """Do something before it is needed. Raises ``EngineError``."""
        if self._worker is None:
            raise EngineError("the executor was shut down")
        try:
            action(self._worker)
        except ChoraleError:
            raise
        except Exception as error:
            raise EngineError(f"a step could not be prepared ({type(error).__name__}: {error})") from error

    def shutdown(self) -> None:
        """Let go of the device's memory. Steps already executed can still be read."""
        self._worker = None


class LocalStep:
    """A step on its way."""

    __slots__ = ("_fetch", "_step_id")

    def __init__(self, step_id: int, fetch: Callable[[], StepResult]) -> None:
        self._step_id, self._fetch = step_id, fetch

    def result(self) -> StepResult:
        """Wait for the device. Raises ``EngineError`` if the step failed."""
        try:
            return self._fetch()
        except ChoraleError:
            raise
        except Exception as error:
            raise EngineError(f"step {self._step_id} failed ({type(error).__name__}: {error})") from error


class StepTimer:
    """How long the device is at each step."""

    def __init__(self, *, overlaps: bool) -> None:
        self._overlaps = overlaps
        self._finished = 0.0  # the step before

    def timed(self, fetch: Callable[[], StepResult], began: float) -> Callable[[], StepResult]:
        """``fetch`` of a step that the host began to launch at ``began`` and has just launched.

        Steps run one after the other: one that was launched while another ran begins at the other's end.
        """
        launched = time.perf_counter()

        def result() -> StepResult:
            found = fetch()
            if not self._overlaps:
                return replace(found, seconds=launched - began)
            before, self._finished = self._finished, time.perf_counter()
            return replace(found, seconds=self._finished - max(began, before))

        return result


def _raising(error: Exception) -> Callable[[], StepResult]:
    def fetch() -> StepResult:
        raise error

    return fetch


def _shut_down() -> StepResult:
    raise EngineError("the executor was shut down")
