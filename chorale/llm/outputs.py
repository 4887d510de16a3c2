"""RequestOutput and CompletionOutput with vLLM's attributes, built from the fold of a turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chorale.engine.types import ExpertIds, TokenLogprobs
from chorale.harmony.vocab import CALL, ENDOFTEXT, Vocabulary
from chorale.llm.params import SamplingParams
from chorale.turns.events import CLIENT_CALLS, Fold, TurnEnded


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None = None  # 1 = most likely
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # by token id: the actual token first, then alternatives


class FlatLogprobs(Sequence[PositionLogprobs | None]):
    """The log-probabilities of all positions, in one list for each attribute, which makes few objects.

    Position ``i`` is entries ``start_indices[i]`` to before ``end_indices[i]`` of the other lists. As a
    sequence, it has a dictionary for each position, None for one without entries.
    """

    def __init__(self, positions: Iterable[PositionLogprobs | None]) -> None:
        self.start_indices, self.end_indices = list[int](), list[int]()
        self.token_ids, self.logprobs = list[int](), list[float]()
        self.ranks, self.decoded_tokens = list[int | None](), list[str | None]()
        for position in positions:
            self.start_indices.append(len(self.token_ids))
            self.token_ids += position or ()
            self.logprobs += (entry.logprob for entry in (position or {}).values())
            self.ranks += (entry.rank for entry in (position or {}).values())
            self.decoded_tokens += (entry.decoded_token for entry in (position or {}).values())
            self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return FlatLogprobs(self[each] for each in range(*index.indices(len(self))))
        own = slice(self.start_indices[index], self.end_indices[index])
        entries = map(Logprob, self.logprobs[own], self.ranks[own], self.decoded_tokens[own])
        return dict(zip(self.token_ids[own], entries, strict=True)) or None


@dataclass(slots=True)
class ToolCall:
    """A tool call in the output of ``LLM.chat``. ``arguments``: JSON text as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """The tokens from ``start`` to ``end`` (excluded) come from weights of this version."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class CompletionOutput:
    """One choice. ``token_ids`` includes the stop token; ``text`` only with ``include_stop_str_in_output``.

    ``finish_reason``: "stop" (also after a tool call: test ``tool_calls``), "length", "abort" or "error"
    (``error`` has the message). ``stop_reason``: the stop string or stop token id; None for ``<|return|>``.
    ``routed_experts`` (with ``enable_return_routed_experts``): uint8 [positions, layers, experts per token],
    for the prompt and the output but its last token; None if ``LLM.chat`` had to force the answer.
    ``weight_versions``: which weights gave which tokens.
    Only ``LLM.chat`` sets ``reasoning`` and ``tool_calls``; its ``text`` is the content of the final channel.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | FlatLogprobs | None = None
    routed_experts: ExpertIds | None = None
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices, in order of index. ``prompt`` is None if token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | FlatLogprobs | None = None
    finished: bool = True
    num_cached_tokens: int = 0


def completion_output(
    index: int,
    fold: Fold,
    ended: TurnEnded,
    logprobs: list[TokenLogprobs],
    params: SamplingParams,
    vocab: Vocabulary,
) -> CompletionOutput:
    """Return the output of one choice. ``logprobs``: one entry per token from the engine, if requested."""
    token_ids = list(ended.output_token_ids)
    output = CompletionOutput(
        index,
        text=(fold.joined("message") or "") if params.detokenize else "",
        token_ids=token_ids,
        finish_reason="stop" if ended.reason == "tool_calls" else ended.reason,
        stop_reason=ended.stop_reason,
        error=None if ended.error is None else ended.error.message,
        reasoning=fold.joined("reasoning"),
        tool_calls=[
            ToolCall(item.opened.name or "", item.text) for item in fold.items if item.kind in CLIENT_CALLS
        ],
    )
    if (
        output.stop_reason is None
        and output.finish_reason == "stop"
        and token_ids[-1:] in ([CALL], [ENDOFTEXT])
    ):
        output.stop_reason = token_ids[-1]
    if params.logprobs is not None or params.logprob_token_ids:
        entries = logprobs[: len(token_ids)]  # there may be tokens after a stop string
        found = (position_logprobs(entry, vocab, ranked=not params.logprob_token_ids) for entry in entries)
        output.logprobs = FlatLogprobs(found) if params.flat_logprobs else list(found)
        output.cumulative_logprob = sum(entry.logprob for entry in entries)
    return output


def position_logprobs(entry: TokenLogprobs, vocab: Vocabulary, *, ranked: bool = True) -> PositionLogprobs:
    """``ranked``: the alternatives are the likeliest tokens, best first."""
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, vocab.decode([entry.token_id]))}
    for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
        found.setdefault(token, Logprob(logprob, rank if ranked else None, vocab.decode([token])))
    return found
