"""Translates OutputEvents to Responses events, with one sequence counter and one terminal event.

The events of an item, in order: ``output_item.added``, ``content_part.added`` (messages and reasoning),
deltas, the text's ``done``, ``content_part.done``, ``output_item.done``. All use the item id of the
OutputEvents, as does the stored item. The rendering of an event depends only on it and the events before it,
not on how they were batched, so the stream of a background response is the same each time. A delta costs one
string encoding and one join.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from chorale.api.http.sse import Frame, encode
from chorale.api.responses.dialects import Dialect, Event, translate_event, with_summary
from chorale.api.responses.event_log import LogEvent, TurnBegan, TurnFailed
from chorale.api.responses.items.built_in_events import TEXT_EVENTS, BuiltInEvents
from chorale.api.responses.items.objects import (
    TEXTS,
    ResponseBuilder,
    annotation,
    is_void,
    item_object,
    output_text,
    reasoning_text,
)
from chorale.api.responses.items.shell_events import CommandEvent, CommandReader, stream_event
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

_BLOCK = 64  # bytes; the length of obfuscated events is a multiple of it
_AROUND = len(b'event: \ndata: ,"obfuscation":""')


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Options of one client's stream. ``obfuscate``: pad deltas, to hide the length of their text."""

    dialect: Dialect = "openai"
    obfuscate: bool = False
    start_after: int = -1  # number of the last event that the client has


class _Open:
    """An item being streamed: its position in the output, and the constant bytes of its deltas."""

    __slots__ = ("after", "before", "commands", "hosted", "index", "kind", "num_cited", "opened", "position")

    def __init__(
        self, opened: ItemOpened, index: int, hosted: BuiltInEvents | None, dialect: Dialect
    ) -> None:
        self.opened = opened
        self.hosted = hosted
        self.commands = CommandReader() if opened.kind == "shell_call" else None
        self.num_cited = 0
        self.index = index
        self.position: dict[str, Any] = {"item_id": opened.item_id, "output_index": index}
        if opened.kind in ("message", "reasoning"):
            self.position["content_index"] = 0
        self.kind = self.before = self.after = b""  # no delta events: only the finished item has the text
        if opened.kind in TEXT_EVENTS:
            kind, position = translate_event(f"{TEXT_EVENTS[opened.kind][0]}.delta", self.position, dialect)
            self.kind = kind.encode()
            self.before = b'%s,"delta":' % encode({"type": kind, **position})[:-1]
            # output_text.delta must have logprobs
            self.after = b',"logprobs":[]' * (opened.kind == "message") + b',"sequence_number":'


class Translator:
    """Translates batches of events, in order, to the frames to send."""

    def __init__(self, builder: ResponseBuilder, options: RenderOptions | None = None) -> None:
        options = options or RenderOptions()
        self._builder = builder
        self._dialect = with_summary(options.dialect, builder.base.get("reasoning") or {})
        self._obfuscate = options.obfuscate
        self._start_after = options.start_after
        self._sequence = 0
        self._frames: list[Frame] = []
        self._open: _Open | None = None
        self._num_shown = 0

    @property
    def next_number(self) -> int:
        return max(self._sequence, self._start_after + 1)

    def start(self) -> list[Frame]:
        """Returns ``response.created``, then ``response.queued`` or ``response.in_progress`` by status."""
        self._lifecycle("created", self._builder.base["status"])
        return self._take()

    def feed(self, events: Iterable[LogEvent]) -> list[Frame]:
        """Translates events. The terminal event comes from ``finish``."""
        for event in events:
            if isinstance(event, ItemDelta):
                self._builder.fold.add((event,))
                self._on_delta(event)
            elif isinstance(event, TurnBegan):
                self._begin()
            elif isinstance(event, TurnFailed):
                self._emit("error", code=event.code, message=event.message, param=event.param)
            else:
                self._builder.fold.add((event,))
                self._on_output(event)
        return self._take()

    def finish(self, body: dict[str, Any]) -> list[Frame]:
        """Returns the terminal event for the status of ``body``, the object that a later GET returns.

        OpenAI has no terminal event for cancelled responses; they end with ``response.incomplete``.
        """
        name = "incomplete" if body["status"] == "cancelled" else body["status"]
        self._emit(f"response.{name}", response=body)
        return self._take()

    def error(self, error: ChoraleError) -> list[Frame]:
        """Returns the ``error`` event, not nested in an ``error`` key: OpenAI's SDK would raise on it.

        It is always sent: its number is greater than ``start_after``.
        """
        self._sequence = self.next_number
        self._emit("error", code=error.code, message=error.message, param=error.param)
        return self._take()

    # ------------------------------------------------------------------ frames

    def _take(self) -> list[Frame]:
        frames, self._frames = self._frames, []
        return frames

    def _emit(self, kind: str, /, **fields: Any) -> None:
        number = self._sequence
        self._sequence = number + 1
        if number > self._start_after:
            kind, fields = translate_event(kind, fields, self._dialect)
            self._push(kind.encode(), encode({"type": kind, **fields, "sequence_number": number}))

    def _emit_all(self, events: Iterable[Event]) -> None:
        for kind, fields in events:
            self._emit(kind, **fields)

    def _push(self, kind: bytes, data: bytes) -> None:
        if self._obfuscate and kind.endswith(b".delta"):
            num_missing = -(len(kind) + len(data) + _AROUND) % _BLOCK
            noise = secrets.token_hex(_BLOCK // 2).encode()[:num_missing]
            data = b'%s,"obfuscation":"%s"}' % (data[:-1], noise)
        self._frames.append((kind, data))

    def _lifecycle(self, *names: str) -> None:
        for name in names:
            self._emit(f"response.{name}", response=self._builder.base)

    def _begin(self) -> None:
        """Adds ``response.in_progress``, unless ``start`` returned it."""
        if self._builder.base["status"] == "queued":
            self._builder.base["status"] = "in_progress"
            self._lifecycle("in_progress")

    # ------------------------------------------------------------------ items

    def _on_output(self, event: OutputEvent) -> None:
        if isinstance(event, ItemOpened):
            self._on_opened(event)
        elif isinstance(event, ItemClosed):
            self._on_closed(event)
        elif isinstance(event, Cited):
            self._on_cited(event)
        elif isinstance(event, ToolStarted | ToolProgressed | ToolOutcome):
            current = self._open
            if current is not None and current.hosted is not None:
                self._emit_all(current.hosted.on_tool(event))

    def _on_opened(self, event: ItemOpened) -> None:
        if not self._builder.shows(event):
            self._open = None
            return
        hosted = None
        if event.kind in BUILTIN_ITEMS:
            hosted = BuiltInEvents(self._builder, self._builder.fold.items[event.index], self._num_shown)
        current = self._open = _Open(event, self._num_shown, hosted, self._dialect)
        if hosted is not None:
            self._emit_all(hosted.open())
            return
        self._num_shown += 1
        empty: Any = "" if event.kind in TEXTS else []
        item = item_object(event, "in_progress", empty)
        self._emit("response.output_item.added", output_index=current.index, item=item)
        if event.kind not in TEXTS:
            part = reasoning_text("") if event.kind == "reasoning" else output_text("", [])
            self._emit("response.content_part.added", **current.position, part=part)

    def _on_delta(self, event: ItemDelta) -> None:
        current = self._open
        if current is None:
            return
        if event.logprobs and self._builder.wants_logprobs and current.opened.kind == "message":
            logprobs = self._builder.logprobs(event.logprobs)
            self._emit("response.output_text.delta", **current.position, delta=event.text, logprobs=logprobs)
            return
        if current.opened.kind == "compaction":
            if not event.text:
                self._emit("response.compaction.compacting", **current.position)
            return
        if current.commands is not None:
            self._emit_commands(current, current.commands.feed(event.text))
            return
        if not event.text or not current.kind:
            return
        number = self._sequence
        self._sequence = number + 1
        if number > self._start_after:
            data = b"%s%s%s%d}" % (current.before, encode(event.text), current.after, number)
            self._push(current.kind, data)

    def _emit_commands(self, current: _Open, events: Iterable[CommandEvent]) -> None:
        for kind, fields in map(stream_event, events):
            self._emit(kind, output_index=current.index, **fields)

    def _on_closed(self, event: ItemClosed) -> None:
        current, self._open = self._open, None
        if current is None:
            return
        if current.hosted is not None:
            self._emit_all(current.hosted.close(event))
            self._num_shown += current.hosted.shown
            return
        item = self._builder.fold.items[event.index]
        if is_void(item):
            return
        shown = self._builder.item(item)
        if current.commands is not None:
            self._emit_commands(current, current.commands.finish(shown["action"]["commands"]))
        self._end_text(current, item.text)
        self._emit("response.output_item.done", output_index=current.index, item=shown)

    def _on_cited(self, event: Cited) -> None:
        current = self._open
        if current is None:
            return
        current.num_cited += 1
        self._emit(
            "response.output_text.annotation.added",
            **current.position,
            annotation_index=current.num_cited - 1,
            annotation=annotation(event.citation),
        )

    def _end_text(self, current: _Open, text: str) -> None:
        item, position = self._builder.fold.items[current.opened.index], current.position
        if item.kind not in TEXT_EVENTS:
            return
        stem, key = TEXT_EVENTS[item.kind]
        more: dict[str, Any] = {"name": current.opened.name} if item.kind == "function_call" else {}
        part = None if item.kind in TEXTS else self._builder.part(item)
        if part is not None and item.kind == "message":
            more = {"logprobs": part["logprobs"]}
        self._emit(f"{stem}.done", **position, **more, **{key: text})
        if part is not None:
            self._emit("response.content_part.done", **position, part=part)
