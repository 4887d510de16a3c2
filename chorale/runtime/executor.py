"""LocalExecutor: the Executor of one rank in this process, and with ``join`` of all ranks of an engine.

The engine process is rank 0. A plan is encoded once and sent to the other ranks before rank 0 runs it; the
results are rank 0's. Every call that changes a worker's state is sent to all ranks in the same order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from chorale.engine.commands import TRANSFERS, Command
from chorale.engine.types import FetchResult, StepPlan, StepResult
from chorale.errors import ChoraleError, EngineError
from chorale.machine.folders import Folder
from chorale.parallel.communicator import Communicator
from chorale.parallel.processes import RankProcesses
from chorale.parallel.wire import Administer, Plan, WorkerCall, encode
from chorale.runtime.gpu_faults import explain
from chorale.runtime.profiler import TorchProfiler
from chorale.runtime.rank_memory import RankMemory
from chorale.runtime.worker import Worker


@dataclass(frozen=True, slots=True)
class OtherRanks:
    """``folder`` holds the ranks' meeting point, which NCCL's group reads until it is closed."""

    processes: RankProcesses
    communicator: Communicator
    folder: Folder


class LocalExecutor:
    """Passes plans to the worker. When ``execute`` returns, the step has run (CPU) or is enqueued (GPU).

    Methods raise ``EngineError``; if another rank was lost, with its number.
    """

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
        self._others: OtherRanks | None = None

    def join(self, others: OtherRanks) -> None:
        """From now on, run everything on the other ranks too, and close them in ``shutdown``."""
        self._others = others

    def execute(self, plan: StepPlan) -> FetchResult:
        """Start a step. Errors of this rank are raised by the returned function."""
        others = self._others
        if others is not None:
            others.processes.send(encode(Plan(plan)))
        began = time.perf_counter()
        try:
            fetch = self._timer.timed(self.worker.run(plan), began)
        except Exception as error:
            fetch = _raising(error)
        doing = f"step {plan.step_id} failed"

        def result() -> StepResult:
            with self._explained(doing):
                found = fetch()
                if others is not None:
                    others.communicator.check()
                return found

        return result

    def later(self, action: Callable[[Worker], None]) -> None:
        """Queue an action for ``use_idle_time``."""
        self._later.append(action)

    def use_idle_time(self) -> bool:
        if self._others is not None:
            self._others.processes.check()
        if not self._later or self._worker is None:
            return False
        self.prepare(self._later.popleft())
        return True

    def prepare(self, action: Callable[[Worker], None]) -> None:
        """Run an action now. With other ranks it must be a ``WorkerCall``."""
        if self._others is not None:
            assert isinstance(action, WorkerCall)
            self._others.processes.send(encode(action))
        worker = self.worker
        with self._explained("a step could not be prepared"):
            action(worker)

    def control(self, command: Command) -> str:
        """Release or restore the device's memory, profile, or update weights. No step is in flight.

        Returns when all ranks have done so: why a rank has refused the command of a weight transfer, or "".
        """
        if command.action == "sleep":
            self._later.clear()
        with self._explained(f"{command.action} failed"):
            if self._others is None:
                return self._control(command)
            task = encode(Administer(command))
            return self._others.processes.carry_out(task, lambda: self._control(command))

    def _control(self, command: Command) -> str:
        if self._memory is not None and command.action in TRANSFERS:
            return self._memory.transfer(command)
        if command.action == "sleep" and self._memory is not None:
            self._worker = None
            self._memory.release(command.level)
        elif command.action == "wake_up" and self._memory is not None:
            self._worker = self._memory.restore(command.tags)
        elif command.action == "start_profile" and self._profiler is not None:
            self._profiler.start()
        elif command.action == "stop_profile" and self._profiler is not None:
            self._profiler.stop()
        return ""

    @property
    def worker(self) -> Worker:
        """The worker, to run it without this executor. Raises ``EngineError`` if there is none."""
        if self._worker is None:
            raise EngineError("the executor was shut down")
        return self._worker

    def shutdown(self) -> None:
        """End the other ranks and release the device's memory. Results of executed steps can still be
        read."""
        if self._others is not None:
            self._others.processes.stop()  # NCCL closes only when all ranks close it
        self._worker = self._memory = None
        if self._others is not None:
            self._others.communicator.close()
            self._others.processes.close()
            self._others.folder.remove()

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Raise errors as ``ChoraleError``s: those of a GPU name it, those of a lost rank name that rank."""
        try:
            yield
        except Exception as error:
            found: ChoraleError | None = explain(error, doing, self._gpu)
            if found is None and isinstance(error, ChoraleError):
                found = error
            if found is None:
                found = EngineError(f"{doing} ({type(error).__name__}: {error})")
            if self._others is not None and isinstance(found, EngineError):
                found = self._others.processes.cause(found)
            if found is error:
                raise
            raise found from error


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


def _raising(error: Exception) -> FetchResult:
    def fetch() -> StepResult:
        raise error

    return fetch
