"""RequestOutput and CompletionOutput: vLLM's attributes, and how the chunks of a choice become one."""

from __future__ import annotations

from dataclasses import dataclass, field

from chorale.engine.types import TokenChunk, TokenLogprobs
from chorale.harmony.text import StopStrings, TextDecoder
from chorale.harmony.vocab import Vocabulary
from chorale.llm.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None = None  # 1 = most likely
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # by token id: the token itself first, then the alternatives


@dataclass(slots=True)
class ToolCall:
    """A call that the model made in ``LLM.chat``. ``arguments`` is JSON text, as the model wrote it."""

    name: str
    arguments: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice. ``token_ids`` includes the stop token, ``text`` only with ``include_stop_str_in_output``.

    ``finish_reason``: "stop", "length", "abort" or "error" (then ``error`` says why). ``stop_reason``: the
    stop string or stop token id; None for the model's own end. ``reasoning`` and ``tool_calls`` are set by
    ``LLM.chat`` only, whose ``text`` is the final channel's.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One prompt with its choices, in the order of their index. ``prompt`` is None for token prompts."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0


class ChoiceBuilder:
    """Chunks of one choice in, a CompletionOutput out. Stop strings are found here.

    Without stop strings nothing but the last chunk changes what the engine does: then ``take`` collects the
    tokens, and they are read at the end, all at once.
    """

    def __init__(self, index: int, params: SamplingParams, vocab: Vocabulary, model_end: int) -> None:
        """``model_end``: the stop id that is the model's own, for which ``stop_reason`` is None."""
        self.output = CompletionOutput(index)
        self._params, self._vocab, self._model_end = params, vocab, model_end
        self._decoder = TextDecoder(vocab)
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self._text: list[str] = []
        self._reads_late = not params.stop_strings
        self.unread: TokenChunk | None = None  # the chunks so far as one, once there are some
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0

    def take(self, chunk: TokenChunk) -> bool:
        """Take over the next chunk. Returns whether the choice has ended."""
        if self.unread is None:
            self.unread = chunk
        else:
            append_chunk(self.unread, chunk)
        if chunk.finish_reason is not None or not self._reads_late:
            chunk, self.unread = self.unread, None
            self.feed(chunk)
        return self.output.finished()

    def feed(self, chunk: TokenChunk) -> None:
        """Read tokens as text. Everything after a stop string is ignored."""
        if self.output.finished():
            return
        if not self._params.detokenize and not chunk.logprobs:
            self.output.token_ids += chunk.token_ids
            chunk.token_ids.clear()
        for place, token in enumerate(chunk.token_ids):
            self.output.token_ids.append(token)
            self._add_logprobs(chunk.logprobs[place] if chunk.logprobs else None)
            is_stop = token == chunk.stop_token_id and place == len(chunk.token_ids) - 1
            if is_stop and not self._params.include_stop_str_in_output:
                break
            matched = self._add_text(token)
            if matched is not None:
                self._finish("stop", matched)
                return
        if chunk.finish_reason is not None:
            own_end = chunk.stop_token_id == self._model_end
            self._show(self._decoder.flush())
            self._text.append(self._stops.flush())
            self.output.error = chunk.error
            self._finish(chunk.finish_reason, None if own_end else chunk.stop_token_id)

    def _add_text(self, token: int) -> str | None:
        """A character that a hidden special token breaks off is shown as U+FFFD, as on the server."""
        params = self._params
        if not params.detokenize:
            return None
        if params.skip_special_tokens and self._vocab.is_special(token):
            return self._show(self._decoder.flush())
        return self._show(self._decoder.feed(token))

    def _show(self, text: str) -> str | None:
        """The stop string that ends in ``text``, if one does."""
        matched = None
        if len(self.output.token_ids) > self._params.min_tokens:
            text, matched = self._stops.feed(text)
        else:
            text = self._stops.pass_over(text)
        self._text.append(text)
        return matched

    def _add_logprobs(self, entry: TokenLogprobs | None) -> None:
        output = self.output
        if output.logprobs is None or entry is None:
            return
        output.logprobs.append(position_logprobs(entry, self._vocab))
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry.logprob

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.output.text = "".join(self._text)
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason


def append_chunk(chunk: TokenChunk, following: TokenChunk) -> None:
    """Make ``chunk`` stand for both."""
    chunk.token_ids += following.token_ids
    if following.logprobs is not None:
        chunk.logprobs = chunk.logprobs or []
        chunk.logprobs += following.logprobs
    chunk.finish_reason, chunk.stop_token_id = following.finish_reason, following.stop_token_id
    chunk.timings, chunk.error = following.timings, following.error


def position_logprobs(entry: TokenLogprobs, vocab: Vocabulary) -> PositionLogprobs:
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, vocab.decode([entry.token_id]))}
    for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
        found.setdefault(token, Logprob(logprob, rank, vocab.decode([token])))
    return found
