"""LocalClient: an EngineClient whose engine runs in this process.

A task on the event loop owns the engine while there is work. It hands over requests and aborts between two
steps, which run in a worker thread, and delivers the chunks of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from chorale.client.admission import capacity
from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.in_flight import InFlightRequests
from chorale.client.stream import RequestStream
from chorale.config.engine import ServerConfig
from chorale.engine.commands import Command, Outcome
from chorale.engine.core import EngineCore
from chorale.engine.types import NOBODY, EngineLimits, GenerateRequest, Owner
from chorale.errors import EngineDeadError
from tests.support.engine.fake_executor import FakeExecutor


class LocalClient:
    """See ``client.base.EngineClient``. Another event loop may be used once nothing is in flight."""

    def __init__(self, core: EngineCore, info: EngineInfo, *, max_queued_requests: int | None = None) -> None:
        """``max_queued_requests``: choices that may wait in addition to ``max_num_seqs``; None: four
        times ``max_num_seqs``."""
        self._core, self.info = core, info
        self._in_flight = InFlightRequests(time.monotonic)
        limits = ServerConfig(max_queued_requests=max_queued_requests)
        self._in_flight.admission.set_capacity(capacity(limits, info.max_num_seqs))
        self.status = EngineStatus("ready")
        self.stats = core.stats()
        # What the engine does not know yet: a request, or one (or one choice of it) to abort.
        self._messages: list[GenerateRequest | tuple[str, int | None]] = []
        self._work: asyncio.Task[None] | None = None

    async def check_grammar(self, grammar: str) -> str | None:
        return await asyncio.wrap_future(self._core.check_grammar(grammar))

    async def control(self, command: Command) -> Outcome:
        """Only while no request runs."""
        return await asyncio.wrap_future(self._core.control(command))

    @property
    def engines(self) -> tuple[LocalClient, ...]:
        return (self,)

    @property
    def num_in_flight(self) -> int:
        return self._in_flight.num_in_flight

    def reserve(self, num_choices: Mapping[str, int], owner: Owner = NOBODY) -> None:
        self._require_engine()
        self._in_flight.admission.reserve(num_choices, owner)

    def release(self, request_ids: Iterable[str]) -> None:
        self._in_flight.admission.release(request_ids)

    def _require_engine(self) -> None:
        if self.status.state != "ready":
            raise EngineDeadError(self.status.message)

    def submit(self, request: GenerateRequest) -> RequestStream:
        self._require_engine()
        stream = self._in_flight.admit(request, self._left)
        self._tell(request)
        return stream

    def abort(self, request_id: str) -> None:
        if self._in_flight.abort(request_id):
            self._tell((request_id, None))

    def _left(self, request_id: str, index: int | None) -> None:
        """Called when a consumer closes its stream early, or leaves one choice of it."""
        if self._in_flight.leave(request_id, index):
            self._tell((request_id, index))

    def _tell(self, message: GenerateRequest | tuple[str, int | None]) -> None:
        self._messages.append(message)
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        """Steps until no work is left. If the engine fails, ends every stream with the error."""
        try:
            while self.status.state == "ready" and (self._messages or self._core.has_work):
                while self._messages:
                    message = self._messages.pop(0)
                    if isinstance(message, GenerateRequest):
                        self._core.add_request(message)
                    else:
                        self._core.abort(*message)
                chunks = await asyncio.to_thread(self._core.step)
                self.stats = self._core.stats()
                self._in_flight.deliver(chunks)
        except Exception as error:  # without this, every stream would hang
            self._fail(EngineStatus("failed", message=f"the engine failed ({type(error).__name__}: {error})"))

    def _fail(self, status: EngineStatus) -> None:
        self.status = status
        self._in_flight.fail_all(lambda: EngineDeadError(status.message))

    async def close(self) -> None:
        """Stops the engine after its current step. Requests in flight fail. Idempotent."""
        if self.status.state == "draining":
            return
        self._fail(EngineStatus("draining", message="the engine was shut down"))
        if self._work is not None and not self._work.done():
            await self._work
        self._core.shutdown()


@contextlib.asynccontextmanager
async def on_fake_device(
    *,
    max_num_seqs: int = 16,
    step_seconds: float = 0.0,
    max_queued_requests: int | None = None,
    routed_experts: tuple[int, int] | None = None,
) -> AsyncIterator[Any]:
    """Yields a client of a real engine with a fake device; closes it at the end."""
    limits = EngineLimits(400, 16, max_num_seqs, 1024, 2048, routed_experts=routed_experts)
    info = EngineInfo(
        model="fake", max_model_len=2048, max_num_seqs=max_num_seqs, routed_experts=routed_experts
    )
    core = EngineCore(limits, FakeExecutor(limits, step_seconds=step_seconds))
    client = LocalClient(core, info, max_queued_requests=max_queued_requests)
    try:
        yield client
    finally:
        await client.close()
