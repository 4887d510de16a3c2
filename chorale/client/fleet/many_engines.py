"""ManyEngines: what the clients of several engines share."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

from chorale.client.admission import Admission, total_capacity
from chorale.client.base import EngineInfo
from chorale.client.remote import MIN_RETRY_AFTER, ClientLimits, RemoteClient
from chorale.client.summary import merge_info
from chorale.engine.types import NOBODY, Owner
from chorale.errors import EngineDeadError, EngineError, EngineLoadingError

SLICE = 512  # blocks of a prompt that are hashed at once: about half a millisecond


class ManyEngines(ABC):
    """One admission for all engines, the sum of what they can take, and a ticker on the event loop."""

    def __init__(
        self,
        max_queued_requests: int | None,
        limits: ClientLimits | None,
        clock: Callable[[], float],
        num_api_processes: int = 1,
    ) -> None:
        self._limits = limits or ClientLimits()
        self._max_queued_requests = max_queued_requests
        self._num_api_processes = num_api_processes
        self._admission = Admission(clock)
        self._info: EngineInfo | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineLoadingError("no engine is ready yet", retry_after=MIN_RETRY_AFTER)
        return self._info

    @property
    def num_in_flight(self) -> int:
        return self._admission.num_in_flight

    def reserve(self, num_choices: Mapping[str, int], owner: Owner = NOBODY) -> None:
        self._require_engine()
        self._admission.reserve(num_choices, owner)

    def release(self, request_ids: Iterable[str]) -> None:
        self._admission.release(request_ids)

    async def check_grammar(self, grammar: str) -> str | None:
        self._require_engine()
        for remote in self._remotes:  # each would say the same; one that is not up raises at once
            with contextlib.suppress(EngineError):
                return await remote.check_grammar(grammar)
        raise EngineDeadError("no engine is running", retry_after=MIN_RETRY_AFTER)

    @property
    @abstractmethod
    def _remotes(self) -> Sequence[RemoteClient]:
        """The clients of all engines that are known, up or not."""

    @abstractmethod
    def _require_engine(self) -> None:
        """Raises a ``ChoraleError`` if no engine takes requests."""

    def _sum_up(self, known: Sequence[RemoteClient], up: Sequence[RemoteClient]) -> None:
        """``up``: those that are counted for admission. The largest request may use all that are known."""
        if not known:
            return
        self._info = merge_info([remote.info for remote in known])
        rows, most = (sum(each.info.max_num_seqs for each in group) for group in (up or known, known))
        self._admission.set_capacity(total_capacity(rows, self._max_queued_requests), self._num_api_processes)
        self._admission.most = total_capacity(most, self._max_queued_requests)

    def _start_ticker(self) -> None:
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def _stop_ticker(self) -> None:
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._limits.ping_interval)
            self._tick()

    def _tick(self) -> None:
        self._admission.tick()
