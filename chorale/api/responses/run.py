"""Run: the execution of one response, streamed or not.

``complete`` and ``stream`` serve a waiting client, and store the response at the end. A background ``Job``
uses ``start``, ``events`` and ``conclude``, and writes to the store itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from chorale.api.http.sse import Frame
from chorale.api.record import record_field
from chorale.api.responses.event_log import LogEvent, TurnBegan, TurnFailed
from chorale.api.responses.items.objects import (
    ResponseBuilder,
    base_object,
    close_items,
    end_error,
    error_object,
    rendering,
)
from chorale.api.responses.prepare import prepare
from chorale.api.responses.prepared import Prepared
from chorale.api.responses.request import ResponsesRequest
from chorale.api.responses.translate import RenderOptions, Translator
from chorale.api.state import ServerState
from chorale.engine.types import SamplingSpec
from chorale.errors import ChoraleError, EngineError
from chorale.machine.tasks import end_tasks
from chorale.store.protocol import KEPT, Lease, StoredItem, StoredResponse
from chorale.turns.events import OutputEvent, ToolStarted, TurnEnded, Usage
from chorale.turns.run import run_turn

logger = logging.getLogger(__name__)

_ACTING = ("code_interpreter_call", "mcp_call")  # may have side effects; searches have none
_SUBMIT_STEPS = 2  # event loop cycles after which a refusal by the engine has arrived


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished response: the body for the client, and the row for the store."""

    body: dict[str, Any]
    record: StoredResponse


class Run:
    """One response. Call ``stream``, ``complete`` or the methods of a job once, and always ``release``.

    ``lease``: the lease on the conversation. ``begun``: the row of a response that another server began; its
    object is kept. ``unstored``: the previous response is not stored, so its conversation is stored with this
    one. ``ended``: the finished response, after ``stream``, ``warm_up`` or ``complete``.
    """

    def __init__(
        self,
        state: ServerState,
        request: ResponsesRequest,
        prepared: Prepared,
        owner: bytes,
        lease: Lease | None = None,
        *,
        unstored: bool = False,
        begun: StoredResponse | None = None,
    ) -> None:
        self.state = state
        self._prepared = prepared
        self.owner = owner
        self._created = prepared.turn.arrival_time if begun is None else begun.created
        self.lease = lease
        self._unstored = unstored
        self.ended: Ended | None = None
        model = state.model_names[0]
        self._builder = ResponseBuilder(
            base_object(request, prepared, model, self._created) if begun is None else begun.to_object(),
            rendering(request),
            state.vocab,
            state.shown_metrics(asked="metrics" in request.include),
        )
        self.acts = False  # a tool with possible side effects was started
        self._turn: AsyncGenerator[list[OutputEvent]] | None = None
        self._first: asyncio.Future[list[OutputEvent]] | None = None

    @property
    def response_id(self) -> str:
        return self._prepared.turn.request_id

    @property
    def history(self) -> tuple[StoredItem, ...]:
        """All items of the conversation that precede this response's output."""
        return (*self._prepared.prompt.history, *self._prepared.prompt.input)

    @property
    def base(self) -> dict[str, Any]:
        """The response object without output."""
        return self._builder.base

    async def complete(self) -> dict[str, Any]:
        """Runs the turn and returns the body. Raises ``ChoraleError`` if the turn fails."""
        turn = self._turn = self._run_turn()
        try:
            async for events in turn:
                self._builder.fold.add(events)
        finally:
            await turn.aclose()
        ended = self._builder.fold.ended
        if ended is not None and (error := end_error(ended)) is not None:
            raise error  # not stored: the client never gets the response's id
        return await self._keep(self.conclude())

    async def stream(self, options: RenderOptions) -> AsyncGenerator[list[Frame]]:
        """Yields lists of frames to send together. Raises only before the first (full queue, no engine).

        The first list is sent once the engine has accepted the request, before the first token.
        """
        translator = Translator(self._builder, options)
        try:
            await self.start()
            yield translator.start()
            async with aclosing(self.events()) as turn:
                async for events in turn:
                    if frames := translator.feed(events):
                        yield frames
            yield await self._last_frames(translator)
        finally:
            await self.close()

    async def warm_up(self, options: RenderOptions) -> AsyncGenerator[list[Frame]]:
        """Adds the prompt to the prefix cache, and yields the frames of a response without output."""
        translator = Translator(self._builder, options)
        turn = replace(self._prepared.turn, sampling=SamplingSpec(max_tokens=0, temperature=0.0))
        stream = self.state.client.submit(turn.first_round())
        usage = Usage(input_tokens=len(turn.prompt_token_ids))
        error: ChoraleError | None = None
        try:
            yield translator.start()
            async for chunk in (chunk async for chunks in stream for chunk in chunks):
                usage.cached_tokens += chunk.num_cached_tokens
                if chunk.finish_reason in ("abort", "error"):
                    error = EngineError(chunk.error or "the engine has stopped this request")
        except ChoraleError as raised:
            error = raised
        finally:
            await stream.aclose()
        self._builder.fold.add([TurnEnded("stop" if error is None else "error", usage, error=error)])
        yield await self._last_frames(translator)

    async def release(self) -> None:
        """Closes the tools and ends the lease, unless that is done. Adds no item to the conversation."""
        await self._prepared.prompt.close()
        lease, self.lease = self.lease, None
        if lease is not None:
            await self.state.leases.release(lease)

    # ------------------------------------------------------------------ methods for a background job

    async def start(self) -> None:
        """Submits the turn to the engine. Raises if the engine refuses it."""
        self._turn = self._run_turn()
        self._first = asyncio.ensure_future(anext(self._turn))
        for _ in range(_SUBMIT_STEPS):
            await asyncio.sleep(0)
        if self._first.done() and self._first.exception() is not None:
            await self._first

    async def events(self) -> AsyncGenerator[list[LogEvent]]:
        """Yields the events of the turn. The caller must pass them to ``fold`` or a ``Translator``.

        Errors are yielded as events, even before the first token.
        """
        assert self._turn is not None
        assert self._first is not None
        try:
            first = await self._first
        except ChoraleError as early:
            yield [self._ended("error", early), TurnFailed.of(early)]
            return
        yield [TurnBegan(), *first]
        async for events in self._turn:
            yield list(events)
        ended = self._builder.fold.ended
        if ended is not None and (error := end_error(ended)) is not None:
            yield [TurnFailed.of(error)]

    def fold(self, events: Sequence[LogEvent]) -> None:
        """Adds events to the response. A ``Translator`` does this itself."""
        for event in events:
            if isinstance(event, OutputEvent):
                self._builder.fold.add((event,))
                if isinstance(event, ToolStarted):
                    self.acts = self.acts or self._builder.fold.items[event.index].kind in _ACTING

    async def close(self) -> None:
        """Stops the turn and aborts it in the engine. Idempotent."""
        await end_tasks(self._first)
        if self._turn is not None:
            await self._turn.aclose()

    def cut(self, error: ChoraleError | None) -> list[LogEvent]:
        """Returns the events that end a response after ``close``, as cancelled or failed with ``error``."""
        closing: list[LogEvent] = close_items(self._builder.fold)
        return [*closing, self._ended("error" if error is not None else "abort", error)]

    def conclude(self, status: str | None = None) -> Ended:
        """Returns the finished response. ``status`` ("cancelled") replaces the turn's status."""
        builder = self._builder
        ended = builder.fold.ended
        if ended is not None:
            self.state.metrics.repaired(ended.repairs)
        output = builder.output()
        body = builder.finish(output)
        if status is not None:
            body |= {"status": status, "error": None}
        record = builder.stored(body, self._prepared.prompt.input, output, self.owner, self._created)
        if self._unstored:
            record = replace(record, previous_id=None, input=self.history)
        self.ended = Ended(body, self._in_conversation(record))
        return self.ended

    def queued_row(self) -> StoredResponse:
        """Returns the row to store while the response is queued."""
        body = self._builder.base
        body["status"] = "queued"
        record = self._builder.stored(body, self._prepared.prompt.input, [], self.owner, self._created)
        return self._in_conversation(record)

    @property
    def has_ended(self) -> bool:
        """Returns whether the turn has ended."""
        return self._builder.fold.ended is not None

    # ------------------------------------------------------------------ internals

    def _run_turn(self) -> AsyncGenerator[list[OutputEvent]]:
        return run_turn(self.state.client, self.state.vocab, self._prepared.turn)

    def _ended(self, reason: Any, error: ChoraleError | None) -> TurnEnded:
        """Returns the last event of a turn that was cut short. Its usage counts the tokens received."""
        usage = Usage(input_tokens=len(self._prepared.prompt.token_ids))
        for item in self._builder.fold.items:
            usage.output_tokens += len(item.content_token_ids)
            if item.kind == "reasoning":
                usage.reasoning_tokens += len(item.content_token_ids)
        return TurnEnded(reason, usage, error=error)

    def _in_conversation(self, record: StoredResponse) -> StoredResponse:
        if self.lease is None:
            return record
        return replace(record, conversation_id=self.lease.conversation_id, conversation_end=self.lease.end)

    async def _last_frames(self, translator: Translator) -> list[Frame]:
        """Stores the response. Returns the terminal event, a failure if its conversation was not written."""
        try:
            return translator.finish(await self._keep(self.conclude()))
        except ChoraleError as error:
            failed = failed_body(self.conclude().body, error)
            return [*translator.error(error), *translator.finish(failed)]

    async def _keep(self, ended: Ended) -> dict[str, Any]:
        """Stores the response before its end is sent, so that clients can read it from then on.

        A store failure is counted, and the response is returned with ``store`` false. In a conversation the
        failure is raised, because the next turn would lack this one.
        """
        body, lease = ended.body, self.lease
        store = self.state.store
        try:
            if body["store"]:
                await store.put(ended.record, lease)
            elif lease is not None:
                kept = (*ended.record.input, *ended.record.output) if body["status"] in KEPT else ()
                await store.conversations.release(lease, kept)
            self.lease = None
        except ChoraleError as error:
            self.state.metrics.series.count("chorale:response_store_failures")
            logger.warning("response %s could not be stored: %s", body["id"], error)
            if lease is not None:
                raise
            self._builder.base["store"] = body["store"] = False
        return body | record_field(self.state.client.info, [self._prepared.turn])


def failed_body(body: dict[str, Any], error: ChoraleError) -> dict[str, Any]:
    return {**body, "status": "failed", "store": False, "completed_at": None, "error": error_object(error)}


async def begin(
    state: ServerState, fields: ResponsesRequest, owner: bytes, history: tuple[StoredItem, ...] | None = None
) -> Run:
    """Leases the conversation and builds the prompt. Nothing is submitted to the engine yet.

    ``history``: the conversation of the previous response, if the store does not have it.
    """
    if fields.background:
        state.background.check_room(state.owner(owner), state.background_room)  # before building the prompt
    lease: Lease | None = None
    if fields.conversation is not None:
        server_id = state.leases.server_id
        lease = await state.store.conversations.take(fields.conversation.id, owner, server_id)
    try:
        prepared = await prepare(state, fields, owner, history)
        return Run(state, fields, prepared, owner, lease, unstored=history is not None)
    except BaseException:
        if lease is not None:
            await state.leases.release(lease)
        raise
