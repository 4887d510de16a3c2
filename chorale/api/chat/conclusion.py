"""The end of a stream of chat completion chunks."""

from __future__ import annotations

from typing import Any

from chorale.api.chat.answer import CHUNK, Answer
from chorale.api.http.sse import DONE, event, last_error
from chorale.api.record import record_field
from chorale.api.state import ServerState
from chorale.api.usage import closing_fields
from chorale.turns.events import TurnEnded, end_error
from chorale.turns.request import TurnRequest


def conclusion(
    state: ServerState, ends: list[TurnEnded], turn: TurnRequest, answer: Answer, with_usage: bool
) -> bytes:
    """Returns the last chunk if it has usage or a record, and ``[DONE]``; or the error of a choice."""
    for ended in ends:
        state.metrics.repaired(ended.repairs)
    error = next((error for ended in ends if (error := end_error(ended)) is not None), None)
    if error is not None:
        return last_error(error)
    record = record_field(state.client.info, [turn])
    last = closing_event(answer, ends if with_usage else None, record) if with_usage or record else b""
    return last + DONE


def closing_event(answer: Answer, ends: list[TurnEnded] | None, record: dict[str, Any]) -> bytes:
    """Returns the last chunk of a stream: no choices, but the total usage of ``ends``, and the record."""
    usage = {} if ends is None else closing_fields([ends], metrics=answer.metrics)
    return event(answer.completion(CHUNK, []) | usage | record)
