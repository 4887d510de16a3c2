"""MessageAnswer: the body of a message, and its stream of Anthropic's server-sent events.

The events are message_start; for each block content_block_start, its deltas and content_block_stop; then
message_delta (stop reason and usage) and message_stop. Blocks are numbered as they are sent. A text block
starts when its first text arrives, so that no block is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from chorale.api.answer import Answer, Ends, Folds
from chorale.api.http.anthropic_errors import error_body
from chorale.api.http.sse import encode, frame
from chorale.api.messages.blocks import call_input, finished_block, opened_block, stops, usage_object
from chorale.api.reasoning_tokens import write_reasoning
from chorale.errors import ChoraleError
from chorale.ids import new_id
from chorale.turns.events import (
    CLIENT_CALLS,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    OutputEvent,
    TurnEnded,
    TurnProgress,
    Usage,
    end_error,
)
from chorale.turns.request import TurnRequest


@dataclass(frozen=True, slots=True)
class MessageAnswer(Answer):
    """The values that are constant over all events of a message. ``turns``: the only turn."""

    turns: tuple[TurnRequest]
    model: str
    shows_thinking: bool
    omits_thinking: bool
    id: str = field(default_factory=lambda: new_id("msg"))

    def object(self, content: list[dict[str, Any]], ended: TurnEnded | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stops(ended),
            "usage": {**usage_object(usage), "service_tier": "standard"},
        }

    def shows(self, opened: ItemOpened) -> bool:
        return self.shows_thinking or opened.kind != "reasoning"

    def body(self, folds: Folds) -> dict[str, Any]:
        fold = folds[0][0]
        ended, shown = fold.result(), [item for item in fold.items if self.shows(item.opened)]
        content = [finished_block(item, omits_thinking=self.omits_thinking) for item in shown]
        return self.object([block for block in content if block is not None], ended, ended.usage)

    def writer(self, position: int, index: int) -> EventWriter:
        return EventWriter(self, whole_calls=not self.turns[0].sampling.grammar)

    def conclusion(self, ends: Ends, record: dict[str, Any]) -> bytes:
        ended = ends[0][0]
        if (error := end_error(ended)) is not None:
            return self.error(error)
        delta = _event("message_delta", delta=stops(ended), usage=usage_object(ended.usage))
        return delta + _event("message_stop", **record)

    def error(self, error: ChoraleError) -> bytes:
        return frame(b"error", encode(error_body(error)))


class EventWriter:
    """Converts the events of each wake-up to bytes.

    ``whole_calls``: a call's arguments are sent only when complete, since no grammar ensures that they are
    JSON.
    """

    def __init__(self, answer: MessageAnswer, *, whole_calls: bool) -> None:
        self._answer = answer
        self._whole_calls = whole_calls
        self._call: list[str] = []
        self._opened: ItemOpened | None = None  # the open item
        self._started = False  # whether its block has started
        self._num_blocks = 0
        self._thought: list[int] = []
        self._before = b""  # constant bytes before the text of a delta
        self._begun = False
        self.ended: TurnEnded | None = None

    def feed(self, events: Iterable[OutputEvent]) -> bytes:
        out: list[bytes] = []
        for event in events:
            if isinstance(event, ItemDelta):
                self._on_delta(event, out)
            elif isinstance(event, ItemOpened):
                self._begin(Usage(), out)
                self._on_opened(event, out)
            elif isinstance(event, ItemClosed):
                self._on_closed(out)
            elif isinstance(event, TurnProgress):
                self._begin(event.usage, out)
            elif isinstance(event, TurnEnded):
                self._begin(event.usage, out)
                self.ended = event
        return b"".join(out)

    def _begin(self, usage: Usage, out: list[bytes]) -> None:
        if not self._begun:
            self._begun = True
            out.append(_event("message_start", message=self._answer.object([], None, usage)))
            out.append(_event("ping"))

    # ------------------------------------------------------------------ blocks

    def _on_opened(self, opened: ItemOpened, out: list[bytes]) -> None:
        self._opened = opened if self._answer.shows(opened) else None
        self._thought = []
        self._started = False
        if self._opened is not None and opened.kind in (*CLIENT_CALLS, "reasoning"):
            self._start(opened, out)

    def _start(self, opened: ItemOpened, out: list[bytes]) -> None:
        self._started = True
        index = self._num_blocks
        out.append(_event("content_block_start", index=index, content_block=opened_block(opened)))
        kind, key = _delta_of(opened)
        head = encode({"type": "content_block_delta", "index": index, "delta": {"type": kind}})[:-2]
        self._before = b'%s,"%s":' % (head, key.encode())

    def _on_delta(self, delta: ItemDelta, out: list[bytes]) -> None:
        opened = self._opened
        if opened is None:
            return
        if opened.kind == "reasoning":
            self._thought += delta.token_ids
            if self._answer.omits_thinking:
                return
        if not delta.text:
            return
        if self._whole_calls and opened.kind in CLIENT_CALLS:
            self._call.append(delta.text)
            return
        if not self._started:
            self._start(opened, out)
        out.append(self._delta(delta.text))

    def _delta(self, text: str) -> bytes:
        return frame(b"content_block_delta", b"%s%s}}" % (self._before, encode(text)))

    def _on_closed(self, out: list[bytes]) -> None:
        opened, self._opened = self._opened, None
        if opened is None or not self._started:
            return
        index = self._num_blocks
        self._num_blocks += 1
        if self._whole_calls and opened.kind in CLIENT_CALLS:
            given, self._call = encode(call_input("".join(self._call))), []
            out.append(self._delta(given.decode()))
        if opened.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": write_reasoning(self._thought)}
            out.append(_event("content_block_delta", index=index, delta=delta))
        out.append(_event("content_block_stop", index=index))


def _delta_of(opened: ItemOpened) -> tuple[str, str]:
    """Returns the type of an item's deltas and the key of their text."""
    if opened.kind == "reasoning":
        return "thinking_delta", "thinking"
    return ("input_json_delta", "partial_json") if opened.kind in CLIENT_CALLS else ("text_delta", "text")


def _event(kind: str, **fields: Any) -> bytes:
    return frame(kind.encode(), encode({"type": kind, **fields}))
