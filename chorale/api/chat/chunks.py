"""The fields of a chat completion, and its chunks: converts a choice's OutputEvents to server-sent events."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from chorale.api.answer import ChunkedAnswer
from chorale.api.chat.builtin import SHOWN, CallWriter, annotation
from chorale.api.chat.request import ChatRequest
from chorale.api.fields import wants_continuous_usage, wants_usage
from chorale.api.http.sse import PLACEHOLDER, Template, event
from chorale.api.state import ServerState
from chorale.api.usage import usage_object, version_field
from chorale.tools.contract import ToolResult
from chorale.turns.events import (
    BUILTIN_ITEMS,
    CLIENT_CALLS,
    SEPARATOR,
    Cited,
    ItemClosed,
    ItemDelta,
    ItemKind,
    ItemOpened,
    OutputEvent,
    ToolOutcome,
    ToolProgressed,
    TurnEnded,
    TurnProgress,
    Usage,
)
from chorale.turns.request import TurnRequest


@dataclass(frozen=True, kw_only=True)
class ChatFields(ChunkedAnswer, ABC):
    """The values that are constant over all chunks of a chat completion."""

    prefix: ClassVar[str] = "chatcmpl"
    constant: ClassVar[dict[str, Any]] = {"service_tier": "default"}

    request: ChatRequest
    reasoning_fields: tuple[str, ...]  # names of the reasoning fields; empty hides it

    @classmethod
    def of(cls, state: ServerState, request: Any, turns: Sequence[TurnRequest], **more: Any) -> Self:
        names = state.config.reasoning_field
        shown = ("reasoning", "reasoning_content") if names == "both" else (names,)
        more["reasoning_fields"] = shown if request.include_reasoning else ()
        return super().of(state, request, turns, **more)

    @property
    def shows_tokens(self) -> bool:
        """Returns whether to send ids and log-probabilities of all tokens, none of which may be hidden."""
        return self.request.return_token_ids and self.request.include_reasoning

    @property
    def legacy_call(self) -> bool:
        """Returns whether the request has ``functions``, so that a call is ``function_call``."""
        return bool(self.request.functions) and not self.request.tools

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self.object("chat.completion.chunk", choices)

    def finish_reason(self, ended: TurnEnded) -> str:
        is_legacy = ended.reason == "tool_calls" and self.legacy_call
        return "function_call" if is_legacy else ended.reason


def call_object(opened: ItemOpened, arguments: str) -> dict[str, Any]:
    """Returns a tool call object. ``arguments``: the input, for a call of a custom tool."""
    if opened.kind == "custom_tool_call":
        custom = {"name": opened.name, "input": arguments}
        return {"id": opened.call_id, "type": "custom", "custom": custom}
    return {
        "id": opened.call_id,
        "type": "function",
        "function": {"name": opened.name, "arguments": arguments},
    }


class ChunkWriter:
    """Writes the chunks of a choice."""

    def __init__(self, answer: ChatFields, turn: TurnRequest, index: int) -> None:
        options, prompt = answer.request.stream_options, turn.prompt_token_ids
        self._answer = answer
        self._index = index
        # Each chunk has a usage key, which is null until the end, as in OpenAI's API, or the usage so far.
        self._with_usage = wants_usage(options)
        self._usage = Usage(len(prompt)) if wants_continuous_usage(options) else None
        self._prompt_token_ids = prompt if answer.request.return_token_ids and index == 0 else None
        self._progress: TurnProgress | None = None
        self._started = False
        self._kind: ItemKind | None = None
        self._num_calls = 0
        self._builtin = CallWriter()
        self._annotations: list[dict[str, Any]] = []
        self._num_chars = 0  # length of the content so far, if it can have citations
        self._text_start = 0  # where the open message's text begins in the content
        self._seen: set[ItemKind] = set()  # kinds that already have text
        self._separate = False  # the next text of the open item starts with SEPARATOR
        self._template: Template | None = None  # the open item's chunk; None: hidden
        # Chunks with more than text are encoded without a template.
        self._slow = self._usage is not None or answer.shows_tokens
        self.ended: TurnEnded | None = None

    def feed(self, events: Iterable[OutputEvent] | str) -> bytes:
        """Returns the chunks of ``events`` as bytes, possibly empty. A string is more text of the open item,
        which has some already and no citations."""
        if isinstance(events, str):
            return b"" if self._template is None else self._template.fill(events)
        out: list[bytes] = []
        if not self._started:
            self._started = True
            out.append(self._first_chunk())
        for item in events:
            if type(item) is ItemDelta:
                self._on_delta(item, out)
            elif isinstance(item, ItemOpened):
                self._on_opened(item, out)
            elif isinstance(item, ItemClosed):
                self._on_closed(item, out)
            elif isinstance(item, TurnProgress):
                self._progress = item
                self._usage = None if self._usage is None else item.usage
            elif isinstance(item, TurnEnded):
                self._on_ended(item, out)
            else:
                self._on_tool(item, out)
        if self._progress is not None and self._answer.shows_tokens:
            out.append(self._chunk({}))  # these tokens have no text, but their ids were requested
        return b"".join(out)

    # ------------------------------------------------------------------ events

    def _on_delta(self, delta: ItemDelta, out: list[bytes]) -> None:
        kind, text = self._kind, delta.text
        if self._template is None or kind is None:
            return
        if self._separate and text:
            text, self._separate = SEPARATOR + text, False
            self._text_start += len(SEPARATOR)
        if text:
            self._seen.add(kind)
            if kind == "message":
                self._num_chars += len(text)
        if self._slow or (delta.logprobs and kind == "message"):
            out.append(self._chunk(self._delta(kind, text), {"logprobs": self._logprobs(kind, delta)}))
        elif text:
            out.append(self._template.fill(text))

    def _on_opened(self, opened: ItemOpened, out: list[bytes]) -> None:
        kind = self._kind = opened.kind
        self._separate = kind not in CLIENT_CALLS | BUILTIN_ITEMS and kind in self._seen
        self._text_start = self._num_chars
        if kind in SHOWN:
            out.append(self._chunk(self._builtin.opened(opened)))
        elif kind in CLIENT_CALLS:
            out.append(self._chunk(self._call_head(opened)))
            self._num_calls += 1
        hidden = kind in BUILTIN_ITEMS - SHOWN or (kind == "reasoning" and not self._answer.reasoning_fields)
        self._template = None if hidden else self._make_template(kind)

    def _on_closed(self, closed: ItemClosed, out: list[bytes]) -> None:
        if self._kind in SHOWN:
            out.append(self._chunk(self._builtin.closed(closed.status)))
        self._kind = None

    def _on_tool(self, item: OutputEvent, out: list[bytes]) -> None:
        """Handles events of built-in tools, and citations."""
        if isinstance(item, Cited):
            self._annotations.append(annotation(item.citation, self._text_start))
        elif isinstance(item, ToolProgressed):
            delta = self._builtin.progressed(item.progress)
            if delta is not None:
                out.append(self._chunk(delta))
        elif isinstance(item, ToolOutcome) and isinstance(item.result, ToolResult):
            self._builtin.came(item.result)

    def _on_ended(self, ended: TurnEnded, out: list[bytes]) -> None:
        self.ended = ended
        if self._annotations:  # all at once, since OpenAI's SDK cannot merge lists without an index
            out.append(self._chunk({"annotations": self._annotations}))
        if ended.reason in ("abort", "error"):
            return  # the caller writes the error
        last = {"finish_reason": self._answer.finish_reason(ended), "stop_reason": ended.stop_reason}
        if self._answer.request.return_weight_versions:
            last |= version_field(ended)
        out.append(self._chunk({}, last))

    # ------------------------------------------------------------------ deltas

    def _delta(self, kind: ItemKind, text: str) -> dict[str, Any]:
        if kind == "reasoning":
            return dict.fromkeys(self._answer.reasoning_fields, text)
        if kind in BUILTIN_ITEMS:
            return self._builtin.written(text)
        if kind not in CLIENT_CALLS:
            return {"content": text}
        if self._answer.legacy_call:
            return {"function_call": {"arguments": text}}
        piece = (
            {"custom": {"input": text}} if kind == "custom_tool_call" else {"function": {"arguments": text}}
        )
        return {"tool_calls": [{"index": self._num_calls - 1, **piece}]}

    def _call_head(self, opened: ItemOpened) -> dict[str, Any]:
        call = call_object(opened, "")
        if self._answer.legacy_call:
            return {"function_call": call["function"]}
        return {"tool_calls": [{"index": self._num_calls, **call}]}

    def _logprobs(self, kind: ItemKind, delta: ItemDelta) -> dict[str, Any] | None:
        num_top = self._answer.request.num_logprobs
        if kind != "message" or num_top is None or not delta.logprobs or self._answer.shows_tokens:
            return None
        return self._answer.logprobs.chat(delta.logprobs, num_top)

    # ------------------------------------------------------------------ chunks

    def _make_template(self, kind: ItemKind) -> Template:
        return Template(self._object(self._delta(kind, PLACEHOLDER)))

    def _first_chunk(self) -> bytes:
        chunk = self._object({"role": "assistant", "content": ""})
        if self._prompt_token_ids is not None:
            chunk["prompt_token_ids"] = self._prompt_token_ids
        if self._usage is not None:
            chunk["usage"] = usage_object(self._usage)
        return event(chunk)

    def _chunk(self, delta: dict[str, Any], more: Mapping[str, Any] = {}) -> bytes:
        """``more``: further fields of the choice."""
        chunk = self._object(delta)
        choice = chunk["choices"][0]
        choice |= more
        progress, self._progress = self._progress, None
        if self._answer.shows_tokens:
            choice["token_ids"] = [] if progress is None else list(progress.token_ids)
            num_top = self._answer.request.num_logprobs
            if num_top is not None and progress is not None and progress.logprobs:
                choice["logprobs"] = self._answer.logprobs.chat(progress.logprobs, num_top)
        if self._usage is not None:
            chunk["usage"] = usage_object(self._usage)
        return event(chunk)

    def _object(self, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._answer.chunk([choice])
        if self._with_usage:
            chunk["usage"] = None
        return chunk
