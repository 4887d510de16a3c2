"""Services of an engine whose model runs on several ranks: each call is made on rank 0 and on the others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from chorale.engine.adapters.queue import AdapterService
from chorale.engine.types import AdapterRef, GrammarService, SamplingSpec
from chorale.parallel.processes import RankProcesses
from chorale.parallel.wire import Adapt, Grammar, encode


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
