"""FleetClient: the EngineClient of several engines, which may come and go while requests run.

The owner starts the engines, announces them (``set_members``), and passes an ``Assigner`` that chooses the
engine of each request. The fleet follows each engine's prefix index and backlog (``follower``) and ranks the
engines for a request (``Members.rank``). Requests and tokens are sent directly between this process and the
engines. A request whose engine is lost continues on another one (``continuation``): its consumer sees a pause
but no error. One ``Admission`` counts the choices of all engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypedDict, Unpack

import msgspec

from chorale.client.admission import NO_LIMITS, Admission, capacity
from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.continuation import Continuation
from chorale.client.fleet.members import Member, Members, Slot, Ticket
from chorale.client.fleet.parts import FleetRequest, Part
from chorale.client.remote import MIN_RETRY_AFTER, ClientLimits, RemoteClient
from chorale.client.stream import RequestStream
from chorale.client.summary import add_stats, merge_info, merge_outcomes, merge_status
from chorale.client.wire.messages import EngineAddress
from chorale.config.engine import ServerConfig
from chorale.config.seeds import SEED_BITS
from chorale.engine.commands import Command, Outcome
from chorale.engine.types import NOBODY, EngineStats, GenerateRequest, Owner, TokenChunk
from chorale.errors import ChoraleError, ConflictError, EngineDeadError, EngineError, EngineLoadingError
from chorale.machine.tasks import end_tasks

logger = logging.getLogger(__name__)


class Assigner(Protocol):
    """Decides which member takes a request, and is told when the member is done with it."""

    async def assign(self, ticket: Ticket) -> str:
        """Returns the member that takes the request; waits until there is one. May be cancelled."""
        ...

    def ended(self, ticket: Ticket) -> None:
        """Called once for each ``assign`` that returned, when its member is done with the request."""
        ...


class FleetOptions(TypedDict, total=False):
    queue: ServerConfig  # limits of the queue
    limits: ClientLimits | None
    patience: float | None  # seconds that a request waits for an engine, by default 60; None: no limit
    seeds: random.Random | None  # seeds of requests that have none
    first_slot: int  # slot that is preferred first if costs are equal; by default random in each process


class FleetClient:
    """An ``EngineClient``; see ``client.base``. Not thread-safe: everything happens on one event loop."""

    def __init__(
        self,
        make_assigner: Callable[[FleetClient], Assigner],
        *,
        gone_patience: float = 10.0,
        most_moves: int = 3,
        **options: Unpack[FleetOptions],
    ) -> None:
        """``gone_patience``: seconds without a ready engine during which requests are still accepted.
        ``most_moves``: how often a request may move to another engine.
        """
        self._limits = options.get("limits") or ClientLimits()
        self._seeds = options.get("seeds") or random.Random()
        self._patience = options.get("patience", 60.0)
        self._gone_patience, self._most_moves = gone_patience, most_moves
        self._admission = Admission(time.monotonic, options.get("queue", NO_LIMITS))
        self._info: EngineInfo | None = None
        self._ticker: asyncio.Task[None] | None = None
        first_slot = options.get("first_slot", random.randrange(1 << 16))
        self.members = Members(self._limits, self._admission, self._status_changed, first_slot)
        self.assigner = make_assigner(self)
        self._requests: dict[str, FleetRequest] = {}
        self._was_up = float("-inf")  # time at which an engine was last ready
        self._closed = False

    # ------------------------------------------------------------------ EngineClient

    @property
    def engines(self) -> Sequence[Slot]:
        """The slots of the engines. A slot whose engine has left is reused by the next engine that joins."""
        return self.members.slots

    @property
    def status(self) -> EngineStatus:
        if not self.members.by_name:
            return EngineStatus("loading", phase="start", message="no engine has been announced")
        return merge_status([member.remote.status for member in self.members.by_name.values()])

    @property
    def stats(self) -> EngineStats:
        return add_stats([slot.stats for slot in self.members.slots])

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
        for remote in self._remotes:  # all engines give the same answer; one that is not up raises at once
            with contextlib.suppress(EngineError):
                return await remote.check_grammar(grammar)
        raise EngineDeadError("no engine is running", retry_after=MIN_RETRY_AFTER)

    async def control(self, command: Command) -> Outcome:
        remotes = [remote for remote in self._remotes if remote.status.state != "failed"]
        if not remotes:
            raise self.members.why_down()
        for remote in remotes:  # none is told if one is missing
            remote.require_engine()
        commands = [command] * len(remotes)
        if command.action == "init_weight_transfer_engine":  # each engine has its own ranks
            ranks = itertools.accumulate((each.info.tensor_parallel_size for each in remotes), initial=0)
            commands = [msgspec.structs.replace(command, first_rank=first) for first in ranks][:-1]
        asked = [each.control(own) for each, own in zip(remotes, commands, strict=True)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        outcomes = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            outcomes.append(each)
        return merge_outcomes(outcomes)

    def submit(self, request: GenerateRequest) -> RequestStream:
        self._require_engine()
        if request.request_id in self._requests:
            raise ConflictError(f"a request with the id {request.request_id} is already running")
        count = request.sampling.n
        self._admission.admit(request)
        if request.sampling.seed is None:  # an engine that continues the request must draw the same noise
            sampling = msgspec.structs.replace(request.sampling, seed=self._seeds.getrandbits(SEED_BITS))
            request = msgspec.structs.replace(request, sampling=sampling)
        stream = RequestStream(request.request_id, count, self._left)
        asked = self._requests[request.request_id] = FleetRequest(request, stream)
        self._begin(Part(asked, self._part_ended, Continuation(request), tuple(range(count))))
        return stream

    def abort(self, request_id: str) -> None:
        asked = self._requests.get(request_id)
        if asked is not None:
            self._leave(asked)
            for index in sorted(asked.open):
                asked.push(TokenChunk(request_id, index, [], finish_reason="abort"))

    async def close(self) -> None:
        """End the requests in flight, and close all connections. Idempotent."""
        self._closed = True
        await end_tasks(self._ticker)
        for asked in list(self._requests.values()):
            self._leave(asked)
            asked.stream.fail(EngineDeadError("the server is shutting down"))
        await self.members.close()

    # ------------------------------------------------------------------ calls by the owner

    def start(self) -> None:
        """Start the periodic tasks on the running event loop."""
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    def set_members(self, addresses: Mapping[str, EngineAddress]) -> None:
        """Set the engines that take requests. Engines that are no longer listed finish their requests."""
        if not self._closed:
            self.members.set(addresses)
            self._status_changed()

    # ------------------------------------------------------------------ assigning a part to an engine

    def _begin(self, part: Part) -> None:
        part.parent.parts.append(part)
        part.sending = asyncio.get_running_loop().create_task(self._send(part))

    async def _send(self, part: Part) -> None:
        try:
            async with asyncio.timeout(self._patience):
                member, ticket = await self._assigned(part.request)
        except TimeoutError:
            message = f"no engine took the request within {self._patience:.0f} s"
            self._give_up(part, EngineDeadError(message, retry_after=MIN_RETRY_AFTER))
        except ChoraleError as error:
            self._give_up(part, error)
        except Exception as error:
            logger.exception("a request could not be assigned")
            self._give_up(part, EngineError(f"the request could not be assigned ({type(error).__name__})"))
        else:
            part.place = member, ticket
            hit = ticket.hits.get(member.name, 0)
            request = msgspec.structs.replace(part.request, num_expected_cached=hit)
            member.remote.take(request, part, member.follower)
            for index in range(request.sampling.n):  # abort choices that were left while the part waited
                if part.indices[index] not in part.open:
                    member.remote.leave(request.request_id, index)

    async def _assigned(self, request: GenerateRequest) -> tuple[Member, Ticket]:
        """Waits until the request is assigned to an engine that can be reached."""
        while True:
            ticket = await self.members.look_up(request)
            name = await self.assigner.assign(ticket)
            try:
                member = await self.members.reach(name)
            except BaseException:
                self.assigner.ended(ticket)
                raise
            if member is not None:
                return member, ticket
            self.assigner.ended(ticket)
            await asyncio.sleep(self._limits.ping_interval)

    # ------------------------------------------------------------------ the end of a part

    def _part_ended(self, part: Part, error: ChoraleError | None) -> None:
        asked = part.parent
        self._stop(part)
        if error is not None:
            if not isinstance(error, EngineDeadError) or asked.num_moves >= self._most_moves or self._closed:
                self._fail(asked, error)
                return
            logger.info("request %s moves to another engine: %s", asked.request.request_id, error.message)
            for successor in asked.successors(part):
                self._admission.admit_again(len(successor.open), asked.request.owner)
                self._begin(successor)
        if not asked.open:
            self._forget(asked)

    def _give_up(self, part: Part, error: ChoraleError) -> None:
        """End a request with an error, because one of its parts found no engine."""
        part.parent.parts.remove(part)
        self._admission.forget(len(part.indices), part.request.owner)
        self._fail(part.parent, error)

    def _fail(self, asked: FleetRequest, error: ChoraleError) -> None:
        self._leave(asked)
        asked.stream.fail(error)

    def _stop(self, part: Part) -> None:
        """Take a part from its engine, or stop looking for one. Idempotent."""
        if part not in part.parent.parts:
            return
        part.parent.parts.remove(part)
        if part.place is not None:
            member, ticket = part.place
            member.remote.leave(part.request_id, None)  # no effect if the part has ended there
            self.assigner.ended(ticket)
        elif part.sending is not None:
            part.sending.cancel()
            self._admission.forget(len(part.indices), part.request.owner)

    # ------------------------------------------------------------------ the consumer leaves

    def _left(self, request_id: str, index: int | None) -> None:
        asked = self._requests.get(request_id)
        if asked is None:
            return
        if index is None:
            self._leave(asked)
            return
        asked.open.discard(index)
        for part in list(asked.parts):
            self._leave_choice(part, index)
        if not asked.open:
            self._forget(asked)

    def _leave_choice(self, part: Part, index: int) -> None:
        own = part.leave(index)
        if own is None:
            return
        if part.place is not None:
            part.place[0].remote.leave(part.request_id, own)
        if not part.open:
            self._stop(part)

    def _leave(self, asked: FleetRequest) -> None:
        """Stop every part of a request."""
        for part in list(asked.parts):
            self._stop(part)
        self._forget(asked)

    def _forget(self, asked: FleetRequest) -> None:
        self._requests.pop(asked.request.request_id, None)

    # ------------------------------------------------------------------ internals

    @property
    def _remotes(self) -> Sequence[RemoteClient]:
        return [member.remote for member in self.members.by_name.values()]

    def _require_engine(self) -> None:
        if self.members.up:
            return
        if time.monotonic() - self._was_up >= self._gone_patience:
            raise self.members.why_down()

    def _status_changed(self) -> None:
        """Update info and capacity. The largest request may use the capacity of all engines not failed."""
        self._note_up()
        known = [each for each in self._remotes if each.is_known and each.status.state != "failed"]
        if not known:
            return
        self._info = merge_info([remote.info for remote in known])
        up, most = (
            capacity(self._admission.limits, sum(each.info.max_num_seqs for each in group))
            for group in (self.members.up or known, known)
        )
        self._admission.set_capacity(up)
        self._admission.most = max(most, 1)

    def _note_up(self) -> None:
        if self.members.up:
            self._was_up = time.monotonic()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._limits.ping_interval)
            self._admission.tick()
            self._note_up()
            self.members.retire()
