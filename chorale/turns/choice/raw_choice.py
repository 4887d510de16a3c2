"""RawChoice: one choice of a raw completion. Tokens to text, without parsing harmony.

It emits the same OutputEvents as a harmony choice (one message item), so streams and bodies are built alike.
Its only need is ``Ended``: a raw completion has one round.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import TypedDict, Unpack

from msgspec.structs import replace

from chorale.engine.types import TokenChunk, TokenLogprobs
from chorale.harmony.text import TextDecoder
from chorale.harmony.vocab import NUM_RANKS, Vocabulary
from chorale.ids import new_id
from chorale.turns.choice.choice import AnyChoice, Choice
from chorale.turns.choice.item import OpenItem, Token
from chorale.turns.choice.stops import StopFilter
from chorale.turns.events import EndReason, ItemOpened, PromptScored, TurnEnded, chunk_error
from chorale.turns.needs import ENDED, Ended
from chorale.turns.request import TurnRequest

_MANY = 16  # a chunk with at least this many tokens is decoded at once, which is cheaper


def _special_positions(token_ids: Sequence[int]) -> list[int]:
    if max(token_ids) < NUM_RANKS:
        return []
    return [position for position, token in enumerate(token_ids) if token >= NUM_RANKS]


class RawOptions(TypedDict, total=False):
    """What a raw choice shows."""

    skip_special_tokens: bool  # by default true; the others false
    discard: bool  # max_tokens was 0: the one token that the engine samples is not part of the answer
    hide_stop: bool  # hide a special token that ended the choice, even if special tokens are shown
    scores_stop: bool  # a hidden stop token is among the item's log-probabilities, so that all tokens are
    in_final: bool  # the prompt is that of a chat, so stop strings end its final text only, as in a chat


class RawChoice(AnyChoice):
    """Takes the chunks of one choice; ``take`` returns its events."""

    def __init__(
        self,
        vocab: Vocabulary,
        request: TurnRequest,
        index: int,
        eos: frozenset[int],
        **options: Unpack[RawOptions],
    ) -> None:
        super().__init__(vocab, request, index, eos)
        self._skip_special = options.get("skip_special_tokens", True)
        self._discard = options.get("discard", False)
        self._hide_stop = options.get("hide_stop", False)
        self._scores_stop = options.get("scores_stop", False)
        in_final = options.get("in_final", False)
        self._decoder = TextDecoder(vocab)
        stop, num_early = request.stop, request.sampling.min_tokens
        self._watch = Choice(vocab, request, index, eos) if in_final and stop else None
        stop = () if in_final else stop
        self._matched: str | None = None  # the stop string that ``_watch`` found
        self._stops = StopFilter(stop, request.include_stop, num_early) if stop else None
        self._item: OpenItem | None = None  # opened with the first chunk
        self._unread: list[Token] = []  # tokens of an incomplete character

    # ------------------------------------------------------------------ tokens in

    def feed(self, chunk: TokenChunk) -> Ended | None:
        """Takes new tokens. Chunks after the end are ignored."""
        out = self._out
        if out.ended:
            return ENDED
        out.on_chunk(chunk)
        if self._item is None:
            self._open()
        if self._watch is not None:
            chunk = self._cut(chunk, self._watch)
        if not self._discard:
            num_before = len(out.sampled)
            self._read(chunk)
            if chunk.logprobs is not None and self._request.progress:
                out.scores += chunk.logprobs[: len(out.sampled) - num_before]
            if out.ended:
                return ENDED
        if self._matched is not None:
            return self.end("stop", self._matched)
        out.usage.output_tokens = len(out.sampled)
        return None if chunk.finish_reason is None else self._on_finish(chunk)

    def _open(self) -> None:
        if self._out.prompt_logprobs is not None:
            self._out.emit(PromptScored(self._out.prompt_logprobs))
        self._item = OpenItem(self._out.new_index(), "message", self._stops)
        self._out.open(self._item, ItemOpened(0, new_id("msg"), "message"))

    def _cut(self, chunk: TokenChunk, watch: Choice) -> TokenChunk:
        """Returns the chunk up to the token that completed a stop string of the final text."""
        need = contextvars.Context().run(watch.feed, chunk)  # it is no choice of the traced request
        events = watch.take()
        if need is None:
            return chunk
        self._watch = None
        ended = events[-1] if events else None
        if not isinstance(ended, TurnEnded) or not isinstance(ended.stop_reason, str):
            return chunk
        self._matched = ended.stop_reason
        kept = len(ended.output_token_ids) - len(self._out.sampled)
        logprobs = None if chunk.logprobs is None else chunk.logprobs[:kept]
        return replace(chunk, token_ids=chunk.token_ids[:kept], logprobs=logprobs, stop_token_id=None)

    def _read(self, chunk: TokenChunk) -> None:
        token_ids, logprobs = chunk.token_ids, chunk.logprobs
        shown = token_ids
        if chunk.stop_token_id is not None and not self._shows_stop(chunk.stop_token_id):
            shown = token_ids[:-1]
        if self._stops is None and logprobs is None and len(shown) >= _MANY:
            self._read_many(shown)
        else:
            for position, token in enumerate(shown):
                self._out.sampled.append(token)
                self._read_one(token, logprobs[position] if logprobs is not None else None)
                if self._out.ended:
                    return
        if self._scores_stop and logprobs is not None:
            self._unread += zip(token_ids[len(shown) :], logprobs[len(shown) :], strict=True)
        self._out.sampled.extend(token_ids[len(shown) :])

    def _shows_stop(self, token_id: int) -> bool:
        if self._vocab.is_special(token_id):
            return not (self._skip_special or self._hide_stop)
        return self._request.include_stop

    def _read_many(self, token_ids: Sequence[int]) -> None:
        """Does the same as one by one, if nothing depends on the text of single tokens."""
        self._out.sampled.extend(token_ids)
        start = 0
        for position in _special_positions(token_ids):
            self._read_run(token_ids[start:position])
            self._read_one(token_ids[position], None)
            start = position + 1
        self._read_run(token_ids[start:])

    def _read_run(self, token_ids: Sequence[int]) -> None:
        text, num_held = self._decoder.feed_all(token_ids)
        unread: list[Token] = [(token, None) for token in token_ids]
        if text:
            num_readable = len(unread) - num_held
            self._add(text, self._unread + unread[:num_readable])
            self._unread = unread[num_readable:]
        else:
            self._unread += unread

    def _read_one(self, token: int, logprobs: TokenLogprobs | None) -> None:
        if self._skip_special and self._vocab.is_special(token):
            text = self._decoder.flush()
        else:
            text = self._decoder.feed(token)
        self._unread.append((token, logprobs))
        if text:
            tokens, self._unread = self._unread, []
            self._add(text, tokens)

    def _add(self, text: str, tokens: list[Token]) -> None:
        assert self._item is not None
        matched = self._item.add(text, tokens)
        if matched is not None:
            self.end("stop", matched, keep_tail=False)

    # ------------------------------------------------------------------ ends

    def _on_finish(self, chunk: TokenChunk) -> Ended:
        if chunk.finish_reason == "error":
            return self.fail(chunk_error(chunk.error))
        if chunk.finish_reason == "abort":
            return self.end("abort")
        if chunk.finish_reason == "length" or self._discard:
            return self.end("length")
        token = chunk.stop_token_id
        return self.end("stop", None if token in self._eos else token)

    def _close(self, reason: EndReason, *, keep_tail: bool) -> EndReason:
        if self._item is not None:
            if keep_tail:
                self._flush_tail(self._item)
            self._out.close("completed" if reason == "stop" else "incomplete")
        return reason

    def _flush_tail(self, item: OpenItem) -> None:
        tail, unread = self._decoder.flush(), self._unread
        self._unread = []
        if not (tail or unread) or item.add(tail, unread) is None:
            item.release()
