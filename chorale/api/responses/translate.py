"""OutputEvents to Responses SSE events: one sequence counter, one terminal event, no ``[DONE]``.

Order of an item: ``output_item.added``, ``content_part.added`` (messages and reasoning), deltas, the text's
``done``, ``content_part.done``, ``output_item.done``. Ids are those of the events, so added, done, terminal
and stored objects cannot disagree. A delta costs one string encoding and one join.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from chorale.api.responses.items.built_in_events import DELTAS, BuiltInEvents, Event
from chorale.api.responses.items.objects import (
    TEXTS,
    ResponseBuilder,
    annotation,
    is_void,
    item_object,
    output_text,
    reasoning_text,
)
from chorale.api.responses.items.shell_events import CommandReader, News, event_of
from chorale.errors import ChoraleError
from chorale.turns.events import (
    BUILTIN_ITEMS,
    Cited,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    OutputEvent,
    ToolOutcome,
    ToolProgressed,
    ToolStarted,
)

_encode = msgspec.json.Encoder().encode

_DELTA = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
    **DELTAS,
}
# What follows the delta's text: output_text.delta must carry logprobs.
_AFTER_TEXT = dict.fromkeys(_DELTA, b',"sequence_number":') | {
    "message": b',"logprobs":[],"sequence_number":'
}


class _Open:
    """An item that is being streamed: where it stands, and the constant bytes of its deltas."""

    __slots__ = ("after", "before", "commands", "hosted", "index", "num_cited", "opened", "place")

    def __init__(self, opened: ItemOpened, index: int, hosted: BuiltInEvents | None) -> None:
        self.opened = opened
        self.hosted = hosted
        self.commands = CommandReader() if opened.kind == "shell_call" else None
        self.num_cited = 0
        self.index = index
        self.place: dict[str, Any] = {"item_id": opened.item_id, "output_index": index}
        if opened.kind in ("message", "reasoning"):
            self.place["content_index"] = 0
        kind = _DELTA.get(opened.kind)
        self.before = self.after = b""  # no deltas: what it wrote is seen in the finished item
        if kind is not None:
            head = _encode({"type": kind, **self.place})[:-1]
            self.before = b'event: %s\ndata: %s,"delta":' % (kind.encode(), head)
            self.after = _AFTER_TEXT[opened.kind]


class Translator:
    """Feed it each wake-up's events, in order; it returns the bytes to send."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._sequence = 0
        self._open: _Open | None = None
        self._num_shown = 0

    @property
    def num_events(self) -> int:
        return self._sequence

    def start(self) -> bytes:
        """``response.created`` and ``response.in_progress``."""
        return self._lifecycle("created", "in_progress")

    def queue(self) -> bytes:
        """``response.created`` and ``response.queued``, of a background response."""
        return self._lifecycle("created", "queued")

    def begin(self) -> bytes:
        """``response.in_progress``, when a background response has its first token."""
        return self._lifecycle("in_progress")

    def _lifecycle(self, *names: str) -> bytes:
        base = self._builder.base
        return b"".join(self._event(f"response.{name}", response=base) for name in names)

    def feed(self, events: Sequence[OutputEvent]) -> bytes:
        """Everything but the terminal event, which ``finish`` makes."""
        self._builder.fold.add(events)
        parts: list[bytes] = []
        for event in events:
            if isinstance(event, ItemDelta):
                parts.append(self._on_delta(event))
            elif isinstance(event, ItemOpened):
                parts.append(self._on_opened(event))
            elif isinstance(event, ItemClosed):
                parts.append(self._on_closed(event))
            elif isinstance(event, Cited):
                parts.append(self._on_cited(event))
            elif isinstance(event, ToolStarted | ToolProgressed | ToolOutcome):
                parts.append(self._on_tool(event))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def finish(self, body: dict[str, Any]) -> bytes:
        """The terminal event, chosen by the status. ``body`` is what a GET will answer.

        OpenAI's events have none for a cancelled response: it ends as an incomplete one.
        """
        name = "incomplete" if body["status"] == "cancelled" else body["status"]
        return self._event(f"response.{name}", response=body)

    def error(self, error: ChoraleError) -> bytes:
        """The flat ``error`` event: no ``error`` key, which OpenAI's SDK would raise on."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    # ------------------------------------------------------------------ items

    def _on_opened(self, event: ItemOpened) -> bytes:
        if not self._builder.shows(event):
            self._open = None
            return b""
        hosted = None
        if event.kind in BUILTIN_ITEMS:
            hosted = BuiltInEvents(self._builder, self._builder.fold.items[event.index], self._num_shown)
        current = self._open = _Open(event, self._num_shown, hosted)
        if hosted is not None:
            return self._events(hosted.open())
        self._num_shown += 1
        empty: Any = "" if event.kind in TEXTS else []
        added = self._event(
            "response.output_item.added",
            output_index=current.index,
            item=item_object(event, "in_progress", empty),
        )
        if event.kind in TEXTS:
            return added
        part = reasoning_text("") if event.kind == "reasoning" else output_text("", [])
        return added + self._event("response.content_part.added", **current.place, part=part)

    def _on_delta(self, event: ItemDelta) -> bytes:
        current = self._open
        if current is None:
            return b""
        if event.logprobs and self._builder.wants_logprobs and current.opened.kind == "message":
            logprobs = self._builder.logprobs(event.logprobs)
            return self._event(
                "response.output_text.delta", **current.place, delta=event.text, logprobs=logprobs
            )
        if current.opened.kind == "compaction":
            return b"" if event.text else self._event("response.compaction.compacting", **current.place)
        if current.commands is not None:
            return self._told(current, current.commands.feed(event.text))
        if current.hosted is not None:
            current.hosted.write(event.text)
        if not event.text or not current.before:
            return b""
        number = self._sequence
        self._sequence = number + 1
        return b"%s%s%s%d}\n\n" % (current.before, _encode(event.text), current.after, number)

    def _told(self, current: _Open, news: Iterable[News]) -> bytes:
        return self._events(
            (kind, {"output_index": current.index, **fields}) for kind, fields in map(event_of, news)
        )

    def _on_closed(self, event: ItemClosed) -> bytes:
        current, self._open = self._open, None
        if current is None:
            return b""
        if current.hosted is not None:
            closing = self._events(current.hosted.close(event))
            self._num_shown += current.hosted.shown
            return closing
        item = self._builder.fold.items[event.index]
        if is_void(item):
            return b""
        shown = self._builder.item(item)
        told = b""
        if current.commands is not None:
            told = self._told(current, current.commands.finish(shown["action"]["commands"]))
        told += self._text_done(current, item.text)
        return told + self._event("response.output_item.done", output_index=current.index, item=shown)

    def _on_cited(self, event: Cited) -> bytes:
        current = self._open
        if current is None:
            return b""
        current.num_cited += 1
        return self._event(
            "response.output_text.annotation.added",
            **current.place,
            annotation_index=current.num_cited - 1,
            annotation=annotation(event.citation),
        )

    def _on_tool(self, event: OutputEvent) -> bytes:
        current = self._open
        if current is None or current.hosted is None:
            return b""
        return self._events(current.hosted.on_tool(event))

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join([self._event(kind, **fields) for kind, fields in events])

    def _text_done(self, current: _Open, text: str) -> bytes:
        item = self._builder.fold.items[current.opened.index]
        place = current.place
        if item.kind == "function_call":
            return self._event(
                "response.function_call_arguments.done", **place, name=current.opened.name, arguments=text
            )
        if item.kind == "custom_tool_call":
            return self._event("response.custom_tool_call_input.done", **place, input=text)
        if item.kind in TEXTS:
            return b""
        part = self._builder.part(item)
        if item.kind == "reasoning":
            done = self._event("response.reasoning_text.done", **place, text=text)
        else:
            done = self._event("response.output_text.done", **place, text=text, logprobs=part["logprobs"])
        return done + self._event("response.content_part.done", **place, part=part)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._sequence
        self._sequence = number + 1
        data = _encode({"type": kind, **fields, "sequence_number": number})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
