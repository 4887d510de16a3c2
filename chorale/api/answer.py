"""Answers of the generating endpoints: ``respond`` runs the turns of a request, and writes their events as a
stream or folds them into a body.

An ``Answer`` says what differs between the endpoints. Only /v1/responses has a loop of its own
(``responses.run``), since its responses may outlive the connection.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, Self

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.fields import StreamedFields, wants_usage
from chorale.api.http.offload import beside, is_heavy
from chorale.api.http.responses import EventStream, large_response, until_disconnect
from chorale.api.http.sse import DONE, event, last_error
from chorale.api.logprobs import LogprobsWriter, is_scored
from chorale.api.record import record_field
from chorale.api.state import ServerState
from chorale.api.usage import ShownMetrics, closing_fields
from chorale.errors import ChoraleError
from chorale.ids import new_completion_id
from chorale.tracing.context import name_response
from chorale.turns.direct import Direct
from chorale.turns.events import Fold, PromptScored, TurnEnded, end_error
from chorale.turns.request import TurnRequest
from chorale.turns.run import Batches, ChoiceEvents, fold_together, run_together, run_turns

Folds = Sequence[Sequence[Fold]]  # of the choices of each turn
Ends = Sequence[Sequence[TurnEnded]]


class Writer(Protocol):
    """Writes the events of a choice for a stream. ``ended``: the last one, once it was read."""

    ended: TurnEnded | None

    def feed(self, events: Any, /) -> bytes:
        """Returns the bytes to send, possibly none. ``events``: a list of ``OutputEvent``."""
        ...


class Answer(ABC):
    """The answer to one request. ``turns``: one for each of its prompts."""

    id: str
    turns: Sequence[TurnRequest]
    is_direct: ClassVar[bool] = False  # writers also take text alone, as ``Direct.encode``

    @property
    def is_stored(self) -> bool:
        """Returns whether ``keep`` stores the answer."""
        return False

    @property
    def is_slow(self) -> bool:
        """Returns whether the body is written in a thread."""
        return any(is_scored(turn.sampling) for turn in self.turns)

    def run(self, state: ServerState, turn: TurnRequest, direct: Direct | None) -> Batches:
        """Returns the events of a turn."""
        return run_turns(state.client, state.vocab, turn, direct)

    @abstractmethod
    def body(self, folds: Folds) -> dict[str, Any]:
        """Returns the body. Raises the ``ChoraleError`` with which a choice ended."""

    @abstractmethod
    def writer(self, position: int, index: int) -> Writer:
        """Returns the writer of a choice. ``position``: of its turn."""

    def opening(self, writers: Sequence[Writer]) -> bytes:
        """Returns what a stream sends before its first events."""
        return b""

    @abstractmethod
    def conclusion(self, ends: Ends, record: dict[str, Any]) -> bytes:
        """Returns the end of a stream: the error of a choice that failed, or what follows all choices."""

    def error(self, error: ChoraleError) -> bytes:
        """Returns the end of a stream that failed before its first events."""
        return last_error(error)

    async def keep(self, state: ServerState, body: Mapping[str, Any]) -> None:
        """Stores the answer, if it ``is_stored``."""
        raise NotImplementedError


async def respond(
    state: ServerState,
    request: Request,
    answer: Answer,
    *,
    stream: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Runs the turns of an answer. Raises the ``ChoraleError`` with which one ended or could not begin."""
    name_response(answer.id)
    if stream:
        return EventStream(partial(_stream, state, answer), headers, on_error=answer.error)
    body = await until_disconnect(request, _complete(state, answer))
    if answer.is_stored:
        await answer.keep(state, body)
    return await large_response(lambda: body, heavy=answer.is_slow or is_heavy(body), headers=headers)


async def _complete(state: ServerState, answer: Answer) -> dict[str, Any]:
    turns = [(turn, answer.run(state, turn, None)) for turn in answer.turns]
    folds = await fold_together(state.client, turns)
    _count_repairs(state, [[fold.ended for fold in row if fold.ended is not None] for row in folds])
    body = await beside(lambda: answer.body(folds), heavy=answer.is_slow)
    return body | record_field(state.client.info, answer.turns)


async def _stream(state: ServerState, answer: Answer, direct: Direct) -> AsyncGenerator[bytes]:
    """Yields the bytes of each batch of events, and the conclusion last."""
    counts = [range(turn.sampling.n) for turn in answer.turns]
    writers = [[answer.writer(position, index) for index in row] for position, row in enumerate(counts)]
    folds = [[Fold() for _ in row] for row in counts] if answer.is_stored else []
    direct.encode = writers[0][0].feed
    opening, is_slow = answer.opening(writers[0]), answer.is_slow
    has_sent = False
    try:
        used = direct if answer.is_direct and not folds else None
        turns = [(turn, answer.run(state, turn, used)) for turn in answer.turns]
        async with aclosing(run_together(state.client, turns)) as running:
            async for position, batch in running:
                if is_slow and _scores_prompt(batch):
                    data = await beside(partial(_feed, writers[position], batch))
                else:
                    data = _feed(writers[position], batch)
                for index, events in batch if folds else ():
                    folds[position][index].add(events)
                if opening:
                    data, opening = opening + data, b""
                if data:
                    has_sent = True
                    yield data
    except ChoraleError as error:  # a turn could not begin; others may have sent text
        if not has_sent:
            raise
        yield answer.error(error)
        return
    ends = [[writer.ended for writer in row if writer.ended is not None] for row in writers]
    _count_repairs(state, ends)
    if folds and all(end_error(ended) is None for row in ends for ended in row):
        await answer.keep(state, answer.body(folds))
    if last := answer.conclusion(ends, record_field(state.client.info, answer.turns)):
        yield last


def _feed(writers: Sequence[Writer], batch: Sequence[ChoiceEvents]) -> bytes:
    if len(batch) == 1:
        return writers[batch[0][0]].feed(batch[0][1])
    return b"".join([writers[index].feed(events) for index, events in batch])


def _scores_prompt(batch: Sequence[ChoiceEvents]) -> bool:
    return any(isinstance(each, PromptScored) for _, events in batch for each in events)


def _count_repairs(state: ServerState, ends: Ends) -> None:
    for ended in (ended for row in ends for ended in row):
        state.metrics.repaired(ended.repairs)


@dataclass(frozen=True, kw_only=True)
class ChunkedAnswer(Answer):
    """What chat completions and completions share, in the body and in the chunks of a stream."""

    prefix: ClassVar[str]  # of the id
    constant: ClassVar[dict[str, Any]] = {}  # further fields, the same in all answers

    turns: Sequence[TurnRequest]
    request: StreamedFields
    model: str
    logprobs: LogprobsWriter
    metrics: ShownMetrics
    fingerprint: str | None
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, state: ServerState, request: Any, turns: Sequence[TurnRequest], **more: Any) -> Self:
        """``request``: as in the subclass; ``more``: the fields that it adds, or other values of these."""
        named = bool(request.logprob_token_ids)
        own: dict[str, Any] = {
            "model": state.model_names[0],
            "logprobs": LogprobsWriter(state.vocab, request.return_tokens_as_token_ids, named),
            "metrics": state.shown_metrics(),
            "fingerprint": state.fingerprint,
            "id": new_completion_id(cls.prefix),
        }
        return cls(request=request, turns=turns, **own | more)

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the top-level fields of a chunk or of the body."""
        fields = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **self.constant,
        }
        return fields if self.fingerprint is None else {**fields, "system_fingerprint": self.fingerprint}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        raise NotImplementedError

    def conclusion(self, ends: Ends, record: dict[str, Any]) -> bytes:
        """Returns a chunk with usage or record, if any, and ``[DONE]``; or an error."""
        for error in (end_error(ended) for row in ends for ended in row):
            if error is not None:
                return last_error(error)
        usage = wants_usage(self.request.stream_options)
        closing = (closing_fields(ends, metrics=self.metrics) if usage else {}) | record
        return event(self.chunk([]) | closing) + DONE if closing else DONE
