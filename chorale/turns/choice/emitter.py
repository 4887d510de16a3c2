"""Emitter: the events of one choice, its token counts, and when events are due.

Both kinds of choice write only to an emitter.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from chorale.engine.types import ChunkTimings, TokenChunk, TokenLogprobs
from chorale.errors import ChoraleError
from chorale.tracing.context import choice_ended
from chorale.turns.choice.item import OpenItem
from chorale.turns.events import (
    Cited,
    EndReason,
    ItemClosed,
    ItemOpened,
    ItemStatus,
    OutputEvent,
    TurnEnded,
    TurnProgress,
    Usage,
)


class Emitter:
    """Collects events until ``take``. ``item`` is the open item, if any; ``open`` and ``close`` set it."""

    def __init__(self, num_prompt_tokens: int, interval: int, *, progress: bool) -> None:
        """``interval``: tokens between two takes after the first; ``progress``: emit ``TurnProgress``."""
        self.usage = Usage(input_tokens=num_prompt_tokens)
        self.sampled: list[int] = []  # every sampled token, headers and terminators included
        self.scores: list[TokenLogprobs] = []  # of the tokens since the last take, with ``progress``
        self.item: OpenItem | None = None
        self.ended = False
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        # As in ``TokenChunk``. None: lost, because a later round has tokens that the choice did not sample.
        self.routed_experts: list[bytes] | None = []
        self.weight_versions: list[tuple[str, int]] = []  # labels, and the first tokens that have them
        self._timings: ChunkTimings | None = None
        self._interval = interval
        self._progress = progress
        self._pending: list[OutputEvent] = []
        self._num_items = 0
        self._repairs: dict[str, int] = {}
        self._is_urgent = False
        self._streamed = False  # a delta was emitted
        self._num_taken = 0  # sampled tokens at the last take

    def on_chunk(self, chunk: TokenChunk) -> None:
        """Takes the metadata of a chunk. Call it before its tokens are added to ``sampled``."""
        if chunk.num_cached_tokens and not self.sampled:
            self.usage.cached_tokens = chunk.num_cached_tokens
        if chunk.timings is not None:
            first, last = self._timings or chunk.timings, chunk.timings
            before = b"" if self._timings is None else self._timings.drafts
            self._timings = replace(first, last_token=last.last_token, drafts=before + last.drafts)
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = tuple(chunk.prompt_logprobs)
        if chunk.routed_experts is not None and self.routed_experts is not None:
            self.routed_experts += chunk.routed_experts
        if chunk.weight_version and chunk.weight_version not in [v for v, _ in self.weight_versions[-1:]]:
            self.weight_versions.append((chunk.weight_version, len(self.sampled)))

    def count_prompt(self, size: int, num_repeated: int) -> None:
        """Counts a prompt. Later model calls read it whole; tokens of earlier calls count as cached."""
        usage = self.usage
        if not self.sampled:  # the first model call: only approved calls have run
            usage.input_tokens = size
            return
        usage.input_tokens += size
        usage.cached_tokens += num_repeated
        usage.later_input_tokens += size
        usage.later_cached_tokens += num_repeated

    def count_repair(self, kind: str) -> None:
        self._repairs[kind] = self._repairs.get(kind, 0) + 1

    # ------------------------------------------------------------------ events in

    def emit(self, *events: OutputEvent, urgent: bool = False) -> None:
        """``urgent``: the next take returns all events, regardless of the interval."""
        self._pending += events
        self._is_urgent = self._is_urgent or urgent

    def new_index(self) -> int:
        self._num_items += 1
        return self._num_items - 1

    def open(self, item: OpenItem, opened: ItemOpened, *, urgent: bool = False) -> None:
        self.item = item
        self.emit(opened, urgent=urgent)

    def close(self, status: ItemStatus, token_ids: tuple[int, ...] = ()) -> None:
        """Closes the open item after the rest of its text."""
        self.flush()
        item, self.item = self.item, None
        assert item is not None
        self._pending.append(ItemClosed(item.index, status, token_ids))

    def flush(self) -> None:
        """Emits the open item's collected text as one delta."""
        item = self.item
        if item is None:
            return
        delta = item.delta()
        if delta is not None:
            self._pending.append(delta)
            self._streamed = True
            item.is_plain = not (self._progress or self._interval > 1 or item.is_filtered or item.is_blank)
        if item.cited:
            self._pending += [Cited(item.index, citation) for citation in item.take_cited()]

    def end(
        self,
        reason: EndReason,
        stop_reason: str | int | None = None,
        error: ChoraleError | None = None,
        tool_state: dict[str, Any] | None = None,
    ) -> None:
        """Emits ``TurnEnded``. All items must be closed."""
        self.ended = True
        choice_ended(reason, None if error is None else error.code)
        if (timings := self._timings) is not None and not timings.last_token:  # ended here, at a stop string
            timings = replace(timings, last_token=time.time())
        spans = [*self.weight_versions, ("", len(self.sampled))]
        self.emit(
            TurnEnded(
                reason=reason,
                usage=self.usage,
                stop_reason=stop_reason,
                error=error,
                repairs=dict(self._repairs),
                output_token_ids=tuple(self.sampled),
                prompt_logprobs=self.prompt_logprobs,
                routed_experts=tuple(self.routed_experts or ()),
                weight_versions=tuple((v, i, j) for (v, i), (_, j) in pairwise(spans) if i < j),
                tool_state=tool_state,
                timings=timings,
            )
        )

    # ------------------------------------------------------------------ events out

    def take(self) -> list[OutputEvent]:
        """Returns the events that are due: the first text at once, then every ``interval`` tokens."""
        num_new = len(self.sampled) - self._num_taken
        if self._streamed and num_new < self._interval and not (self.ended or self._is_urgent):
            return []
        self._is_urgent = False
        self.flush()
        events = self._pending
        if not events and not (num_new and self._progress):
            return events
        self._pending = []
        if self._progress:
            fresh = tuple(self.sampled[self._num_taken :])
            events.insert(0, TurnProgress(fresh, self.usage.copy(), tuple(self.scores)))
            self.scores = []
        self._num_taken = len(self.sampled)
        return events
