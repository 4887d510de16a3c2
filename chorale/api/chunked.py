"""ChunkedAnswer: what chat completions and completions share, in the body and in the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from chorale.api.fields import StreamedFields, wants_usage
from chorale.api.http.sse import DONE, event, last_error
from chorale.api.logprobs import LogprobsWriter
from chorale.api.state import ServerState
from chorale.api.usage import ShownMetrics, closing_fields
from chorale.ids import new_completion_id
from chorale.turns.events import TurnEnded, end_error


@dataclass(frozen=True, kw_only=True)
class ChunkedAnswer:
    """The values that are constant over all chunks of an answer."""

    prefix: ClassVar[str]  # of the id
    constant: ClassVar[dict[str, Any]] = {}  # further fields, the same in all answers

    request: StreamedFields
    model: str
    logprobs: LogprobsWriter
    metrics: ShownMetrics
    fingerprint: str | None
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, state: ServerState, request: Any, **more: Any) -> Self:
        """``request``: as in the subclass; ``more``: the fields that it adds."""
        named = bool(request.logprob_token_ids)
        return cls(
            request=request,
            model=state.model_names[0],
            logprobs=LogprobsWriter(state.vocab, request.return_tokens_as_token_ids, named),
            metrics=state.shown_metrics(),
            fingerprint=state.fingerprint,
            id=new_completion_id(cls.prefix),
            **more,
        )

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

    def conclusion(self, ends: Sequence[Sequence[TurnEnded]], record: dict[str, Any]) -> bytes:
        """Returns the end of a stream: a chunk with usage or record, if any, and ``[DONE]``; or an error."""
        for error in (end_error(ended) for of_prompt in ends for ended in of_prompt):
            if error is not None:
                return last_error(error)
        usage = wants_usage(self.request.stream_options)
        closing = (closing_fields(ends, metrics=self.metrics) if usage else {}) | record
        return event(self.chunk([]) | closing) + DONE if closing else DONE
