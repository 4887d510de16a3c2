"""RawChoice: one choice of a raw completion. Tokens to text, with no reading of harmony in it.

It speaks the same OutputEvents as a harmony choice (one message item), so that streams and bodies are made
the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from chorale.engine.types import ChunkTimings, TokenChunk, TokenLogprobs
from chorale.errors import ChoraleError
from chorale.harmony.text import TextDecoder
from chorale.harmony.vocab import Vocabulary
from chorale.ids import new_id
from chorale.turns.events import (
    EndReason,
    ItemClosed,
    ItemOpened,
    OutputEvent,
    PromptScored,
    TurnEnded,
    TurnProgress,
    Usage,
    chunk_error,
)
from chorale.turns.item import OpenItem, Token
from chorale.turns.options import Round, TurnOptions
from chorale.turns.stops import StopFilter


@dataclass(frozen=True, slots=True)
class RawOptions:
    skip_special_tokens: bool = True
    discard: bool = False  # max_tokens was 0: the one token that the engine samples is not part of the answer


class RawChoice:
    """The same face as ``Choice``; a raw completion has one round."""

    def __init__(
        self,
        vocab: Vocabulary,
        options: TurnOptions,
        raw: RawOptions,
        index: int,
        num_prompt_tokens: int,
        eos: frozenset[int],
    ) -> None:
        self.index = index
        self.ended = False
        self.next_round: Round | None = None
        self.num_rounds = 0
        self.sampled: list[int] = []
        self.usage = Usage(input_tokens=num_prompt_tokens)
        self._vocab = vocab
        self._options = options
        self._raw = raw
        self._eos = eos
        self._decoder = TextDecoder(vocab)
        stops = StopFilter(options.stop, options.include_stop, options.min_tokens) if options.stop else None
        self._item = OpenItem(0, "message", stops)
        self._pending: list[OutputEvent] = []
        self._opened = False
        self._unread: list[Token] = []  # inside a character
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._timings: ChunkTimings | None = None
        self._streamed = False
        self._num_taken = 0

    # ------------------------------------------------------------------ tokens in

    def feed(self, chunk: TokenChunk) -> bool:
        """Take in new tokens. True: ended. Chunks after the end are ignored."""
        if self.ended:
            return True
        self._on_first(chunk)
        shown = chunk.token_ids
        if self._raw.discard:
            shown = []
        elif chunk.stop_token_id is not None and not self._shows_stop(chunk.stop_token_id):
            shown = shown[:-1]
        logprobs = chunk.logprobs
        for position, token in enumerate(shown):
            self.sampled.append(token)
            self._feed_token(token, logprobs[position] if logprobs is not None else None)
            if self.ended:
                return True
        if not self._raw.discard:
            self.sampled.extend(chunk.token_ids[len(shown) :])
        self.usage.output_tokens = len(self.sampled)
        if chunk.finish_reason is None:
            return False
        self._timings = chunk.timings
        self._on_finish(chunk)
        return True

    def _on_first(self, chunk: TokenChunk) -> None:
        if self._opened:
            return
        self._opened = True
        self.usage.cached_tokens = chunk.num_cached_tokens
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = tuple(chunk.prompt_logprobs)
            self._pending.append(PromptScored(self._prompt_logprobs))
        self._pending.append(ItemOpened(0, new_id("msg"), "message"))

    def _shows_stop(self, token_id: int) -> bool:
        if self._vocab.is_special(token_id):
            return not self._raw.skip_special_tokens
        return self._options.include_stop

    def _feed_token(self, token: int, logprobs: TokenLogprobs | None) -> None:
        if self._raw.skip_special_tokens and self._vocab.is_special(token):
            text = self._decoder.flush()
        else:
            text = self._decoder.feed(token)
        self._unread.append((token, logprobs))
        if text:
            tokens, self._unread = self._unread, []
            self._add(text, tokens)

    def _add(self, text: str, tokens: list[Token]) -> None:
        matched = self._item.add(text, tokens)
        if matched is not None:
            self._end("stop", matched, None, keep_tail=False)

    # ------------------------------------------------------------------ ends

    def _on_finish(self, chunk: TokenChunk) -> None:
        if chunk.finish_reason == "error":
            self.fail(chunk_error(chunk.error))
        elif chunk.finish_reason == "abort":
            self.end("abort")
        elif chunk.finish_reason == "length" or self._raw.discard:
            self.end("length")
        else:
            token = chunk.stop_token_id
            self.end("stop", None if token in self._eos else token)

    def begin_round(self, following: Round) -> None:
        raise NotImplementedError("a raw completion has one round")

    def end(self, reason: EndReason, stop_reason: str | int | None = None) -> None:
        self._end(reason, stop_reason, None)

    def fail(self, error: ChoraleError) -> None:
        self._end("error", None, error)

    def _end(
        self,
        reason: EndReason,
        stop_reason: str | int | None,
        error: ChoraleError | None,
        keep_tail: bool = True,
    ) -> None:
        if self.ended:
            return
        self.ended = True
        self.usage.output_tokens = len(self.sampled)
        if keep_tail:
            self._flush_tail()
        self._flush()
        if self._opened:
            self._pending.append(ItemClosed(0, "completed" if reason == "stop" else "incomplete"))
        self._pending.append(
            TurnEnded(
                reason=reason,
                usage=self.usage,
                stop_reason=stop_reason,
                error=error,
                output_token_ids=tuple(self.sampled),
                prompt_logprobs=self._prompt_logprobs,
                timings=self._timings,
            )
        )

    def _flush_tail(self) -> None:
        tail, unread = self._decoder.flush(), self._unread
        self._unread = []
        if (tail or unread) and self._item.add(tail, unread) is not None:
            return
        self._item.release()

    # ------------------------------------------------------------------ events out

    def _flush(self) -> None:
        delta = self._item.delta()
        if delta is not None:
            self._pending.append(delta)
            self._streamed = True

    def take(self) -> list[OutputEvent]:
        """The events that are due: the first text at once, then every ``stream_interval`` tokens."""
        num_new = len(self.sampled) - self._num_taken
        if self._streamed and num_new < self._options.stream_interval and not self.ended:
            return []
        self._flush()
        events = self._pending
        if self._options.progress and (events or num_new):
            fresh = tuple(self.sampled[self._num_taken :])
            events.insert(0, TurnProgress(fresh, self.usage.copy()))
        self._pending = []
        self._num_taken = len(self.sampled)
        return events
