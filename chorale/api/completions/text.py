"""Chunks and body of text completions, from the events of raw choices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from chorale.api.answer import ChunkedAnswer, Folds
from chorale.api.completions.request import CompletionRequest, PromptTurn
from chorale.api.fields import wants_continuous_usage, wants_usage
from chorale.api.http.sse import PLACEHOLDER, Template, event
from chorale.api.routed_experts import expert_field
from chorale.api.state import ServerState
from chorale.api.usage import closing_fields, usage_object, version_field
from chorale.engine.types import TokenLogprobs
from chorale.harmony.text import TextDecoder
from chorale.harmony.vocab import Vocabulary
from chorale.turns.direct import Direct
from chorale.turns.events import (
    Fold,
    ItemDelta,
    OutputEvent,
    PromptScored,
    TurnEnded,
    TurnProgress,
    Usage,
)
from chorale.turns.request import TurnRequest
from chorale.turns.run import Batches, run_raw


@dataclass(frozen=True, kw_only=True)
class TextAnswer(ChunkedAnswer):
    """``texts``: those of the prompts, see ``PromptTurn``."""

    prefix: ClassVar[str] = "cmpl"

    request: CompletionRequest
    texts: Sequence[str]

    @classmethod
    def of_prompts(
        cls, state: ServerState, request: CompletionRequest, prompts: Sequence[PromptTurn], **more: Any
    ) -> TextAnswer:
        texts = [one.text for one in prompts]
        return cls.of(state, request, [one.turn for one in prompts], texts=texts, **more)

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        body = self.object("text_completion", choices)
        if usage is not None or wants_usage(self.request.stream_options):
            body["usage"] = usage
        return body

    def run(self, state: ServerState, turn: TurnRequest, direct: Direct | None) -> Batches:
        return run_raw(state.client, state.vocab, turn, **self.request.raw_options)

    def body(self, folds: Folds) -> dict[str, Any]:
        ends = [[fold.result() for fold in row] for row in folds]
        choices = [
            body_choice(ChoiceText(self, position, index), fold)
            for position, row in enumerate(folds)
            for index, fold in enumerate(row)
        ]
        return self.chunk(choices) | closing_fields(ends, metrics=self.metrics)

    def writer(self, position: int, index: int) -> TextChunkWriter:
        return TextChunkWriter(ChoiceText(self, position, index))


class OffsetWriter:
    """Computes where each token's text begins in a choice's text, including an echoed prompt."""

    __slots__ = ("_decoder", "_offset", "_skip_special", "_vocab")

    def __init__(self, vocab: Vocabulary, skip_special: bool) -> None:
        self._vocab = vocab
        self._decoder = TextDecoder(vocab)
        self._skip_special = skip_special
        self._offset = 0

    def entries(
        self, tokens: Iterable[int], logprobs: Iterable[TokenLogprobs | None], is_prompt: bool = False
    ) -> list[tuple[int, TokenLogprobs | None, int]]:
        found = []
        for token, entry in zip(tokens, logprobs, strict=False):
            found.append((token, entry, self._offset))
            if is_prompt or not (self._skip_special and self._vocab.is_special(token)):
                self._offset += len(self._decoder.feed(token))
        return found


class ChoiceText:
    """Builds what the chunks and the body of a choice share. ``position``: of its prompt."""

    def __init__(self, answer: TextAnswer, position: int, index: int) -> None:
        self.answer = answer
        self.turn, self.prompt = answer.turns[position], answer.texts[position]
        self.index = position * answer.request.n + index
        self._offsets = OffsetWriter(answer.logprobs.vocab, answer.request.skip_special_tokens)

    def echoed(self, scored: Sequence[TokenLogprobs | None] | None) -> tuple[str, dict[str, Any] | None]:
        """Returns the prompt's text, and its log-probabilities if requested."""
        num_top = self.answer.request.logprobs
        if num_top is None:
            return self.prompt, None
        ids = self.turn.prompt_token_ids
        entries = self._offsets.entries(ids, scored or [None] * len(ids), is_prompt=True)
        return self.prompt, self.answer.logprobs.completion(entries, num_top)

    def logprobs(self, tokens: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> dict[str, Any] | None:
        num_top = self.answer.request.logprobs
        if num_top is None:
            return None
        return self.answer.logprobs.completion(self._offsets.entries(tokens, logprobs), num_top)

    def choice(
        self, text: str, logprobs: dict[str, Any] | None, ended: TurnEnded | None = None
    ) -> dict[str, Any]:
        finish_reason = None if ended is None else ended.reason
        choice = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if ended is not None:
            choice["stop_reason"] = ended.stop_reason
            if self.answer.request.return_weight_versions:
                choice |= version_field(ended)
        return choice


def body_choice(text: ChoiceText, fold: Fold) -> dict[str, Any]:
    request, ended = text.answer.request, fold.result()
    texts, lists = [], []
    if request.echo:
        prompt_text, prompt_logprobs = text.echoed(ended.prompt_logprobs)
        texts.append(prompt_text)
        lists.append(prompt_logprobs)
    for item in fold.items:
        texts.append(item.text)
        lists.append(text.logprobs(item.content_token_ids, item.logprobs))
    choice = text.choice("".join(texts), _joined(lists), ended)
    scored = ended.prompt_logprobs if request.prompt_logprobs is not None else None
    # Clients of vLLM read these keys, and its answers always have them.
    choice["prompt_logprobs"] = None if scored is None else text.answer.logprobs.prompt(scored)
    choice["prompt_token_ids"] = text.turn.prompt_token_ids if request.return_token_ids else None
    choice["token_ids"] = list(ended.output_token_ids) if request.return_token_ids else None
    return choice | expert_field(text.turn, ended)


def _joined(lists: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    present = [logprobs for logprobs in lists if logprobs is not None]
    if not present:
        return None
    return {key: [value for logprobs in present for value in logprobs[key]] for key in present[0]}


class TextChunkWriter:
    """Converts a choice's events to server-sent events."""

    def __init__(self, text: ChoiceText) -> None:
        self._text = text
        request = text.answer.request
        self._continuous = wants_continuous_usage(request.stream_options)
        self._slow = request.logprobs is not None or request.return_token_ids or self._continuous
        self._template = Template(text.answer.chunk([text.choice(PLACEHOLDER, None)]))
        self._started = False
        self._prompt_token_ids = text.turn.prompt_token_ids if request.return_token_ids else None
        self._progress: TurnProgress | None = None
        self._usage: Usage | None = None
        self.ended: TurnEnded | None = None

    def feed(self, events: Sequence[OutputEvent]) -> bytes:
        """Returns the chunks of ``events`` as bytes, possibly empty. The first chunk may have no text."""
        begins = not self._started
        out = self._start(events) if begins else []
        for item in events:
            if type(item) is ItemDelta:
                self._on_delta(item, out)
            elif isinstance(item, TurnProgress):
                self._progress, self._usage = item, item.usage
            elif isinstance(item, TurnEnded):
                self._on_ended(item, out)
        shows_ids = self._progress is not None and self._text.answer.request.return_token_ids
        if (shows_ids or (begins and not out)) and self.ended is None:
            out.append(self._chunk(self._text.choice("", None)))
        return b"".join(out)

    def _start(self, events: Sequence[OutputEvent]) -> list[bytes]:
        self._started = True
        if not self._text.answer.request.echo:
            return []
        scored = next((item.logprobs for item in events if isinstance(item, PromptScored)), None)
        return [self._event(self._text.choice(*self._text.echoed(scored)))]

    def _on_delta(self, delta: ItemDelta, out: list[bytes]) -> None:
        if not self._slow:
            out.append(self._template.fill(delta.text))
            return
        logprobs = self._text.logprobs(delta.token_ids, delta.logprobs)
        out.append(self._chunk(self._text.choice(delta.text, logprobs)))

    def _on_ended(self, ended: TurnEnded, out: list[bytes]) -> None:
        self.ended = ended
        if ended.reason not in ("abort", "error"):  # the caller writes the error
            out.append(self._chunk(self._text.choice("", None, ended)))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        request = self._text.answer.request
        progress, self._progress = self._progress, None
        if request.return_token_ids:
            choice["token_ids"] = [] if progress is None else list(progress.token_ids)
        usage = self._usage if self._continuous else None
        return self._event(choice, None if usage is None else usage_object(usage))

    def _event(self, choice: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        """Returns a chunk. If requested, the first one of a choice contains the prompt's token ids."""
        if self._prompt_token_ids is not None:
            choice["prompt_token_ids"], self._prompt_token_ids = self._prompt_token_ids, None
        return event(self._text.answer.chunk([choice], usage))
