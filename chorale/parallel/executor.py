"""RankedExecutor: the Executor of an engine whose model runs on several ranks.

The engine process is rank 0. A plan is encoded once and sent to all ranks before rank 0 runs it; the results
are rank 0's. Every call that changes a worker's state is sent to all ranks in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from chorale.engine.adapters.queue import AdapterService
from chorale.engine.commands import Command
from chorale.engine.types import AdapterRef, FetchResult, GrammarService, SamplingSpec, StepPlan, StepResult
from chorale.errors import EngineError
from chorale.machine.folders import Folder
from chorale.parallel.communicator import Communicator
from chorale.parallel.processes import RankProcesses
from chorale.parallel.wire import Adapt, Administer, Grammar, Plan, WorkerCall, encode


class FirstExecutor(Protocol):
    """The executor of rank 0: ``runtime.executor.LocalExecutor``."""

    def execute(self, plan: StepPlan) -> FetchResult: ...

    def prepare(self, action: WorkerCall) -> None: ...

    def control(self, command: Command) -> str: ...

    def shutdown(self) -> None: ...


class RankedExecutor:
    """Runs every step on all ranks."""

    def __init__(
        self, first: FirstExecutor, ranks: RankProcesses, communicator: Communicator, folder: Folder
    ) -> None:
        """``folder`` holds the ranks' meeting point, which NCCL's group reads until it is closed."""
        self._first, self._ranks, self._communicator = first, ranks, communicator
        self._folder = folder
        self._later: deque[WorkerCall] = deque()

    def execute(self, plan: StepPlan) -> FetchResult:
        """Start a step on all ranks. This and the returned function, which waits for rank 0's result, raise
        ``EngineError`` with the number of a lost rank."""
        self._ranks.send(encode(Plan(plan)))
        fetch = self._first.execute(plan)

        def result() -> StepResult:
            try:
                found = fetch()
                self._communicator.check()
                return found
            except EngineError as error:
                raise self._ranks.cause(error) from error

        return result

    def later(self, action: WorkerCall) -> None:
        """Queue an action for ``use_idle_time``."""
        self._later.append(action)

    def use_idle_time(self) -> bool:
        self._ranks.check()
        if not self._later:
            return False
        self.prepare(self._later.popleft())
        return True

    def prepare(self, action: WorkerCall) -> None:
        """Run an action on every rank now. Raises ``EngineError``."""
        self._ranks.send(encode(action))
        try:
            self._first.prepare(action)
        except EngineError as error:
            raise self._ranks.cause(error) from error

    def control(self, command: Command) -> str:
        """Execute a command on every rank; returns when all have done so: why one of them has refused, or "".
        Raises ``EngineError``."""
        if command.action == "sleep":
            self._later.clear()
        try:
            return self._ranks.carry_out(encode(Administer(command)), lambda: self._first.control(command))
        except EngineError as error:
            raise self._ranks.cause(error) from error

    def shutdown(self) -> None:
        """End the other ranks and release the memory of this one."""
        self._ranks.stop()  # NCCL closes only when all ranks close it
        self._first.shutdown()
        self._communicator.close()
        self._ranks.close()
        self._folder.remove()


class RankedGrammars:
    """The ``GrammarService`` of an engine with several ranks: each rank compiles the grammars of its rows."""

    def __init__(self, first: GrammarService, ranks: RankProcesses) -> None:
        self._first, self._ranks = first, ranks

    def prepare(self, sampling: SamplingSpec, context: Sequence[int]) -> Future[str | None]:
        self._ranks.send(encode(Grammar(sampling.grammar)))
        return self._first.prepare(sampling, context)

    def check(self, grammar: str) -> Future[str | None]:
        return self._first.check(grammar)

    def close(self) -> None:
        self._first.close()


class RankedAdapters:
    """The ``AdapterService`` of an engine with several ranks, each of which has its part of an adapter."""

    def __init__(self, first: AdapterService, ranks: RankProcesses) -> None:
        self._first, self._ranks = first, ranks
        self._thread = ThreadPoolExecutor(1, "adapters of ranks")  # waits for all ranks

    def load(self, adapter: AdapterRef) -> Future[None]:
        others = self._ranks.adapt(Adapt("load", adapter))
        return self._thread.submit(_wait_for, [self._first.load(adapter), *others])

    def place(self, adapter: AdapterRef, slot: int) -> Future[None]:
        others = self._ranks.adapt(Adapt("place", adapter, slot))
        return self._thread.submit(_wait_for, [self._first.place(adapter, slot), *others])

    def forget(self, adapter_id: int) -> None:
        self._ranks.send(encode(Adapt("forget", AdapterRef(adapter_id))))
        self._first.forget(adapter_id)

    def close(self) -> None:
        """Close this rank's service. Calls to other ranks end when their processes end."""
        self._first.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _wait_for(futures: list[Future[None]]) -> None:
    """Wait for all, and raise the first error."""
    wait(futures)
    for each in futures:
        each.result()
