"""Batch: the turns of one call of ``LLM``. It reads their chunks and builds their RequestOutputs.

Choices are the server's classes: they read tokens and return their next need (``turns.needs``). Nothing here
is asynchronous: the thread that gets a step's chunks reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec

from chorale.client.base import EngineInfo
from chorale.engine.admission import sampling_fault
from chorale.engine.types import GenerateRequest, TokenChunk, TokenLogprobs
from chorale.errors import ContextLengthError, RequestError
from chorale.harmony.vocab import Vocabulary
from chorale.llm.metrics import LlmMetrics
from chorale.llm.outputs import (
    CompletionOutput,
    FlatLogprobs,
    RequestOutput,
    WeightVersionSpan,
    completion_output,
    position_logprobs,
)
from chorale.llm.params import SamplingParams, check_compiles, check_for
from chorale.llm.prompts import Prompt, check_prompt
from chorale.turns.choice.choice import Choice
from chorale.turns.choice.raw_choice import RawChoice
from chorale.turns.events import Fold
from chorale.turns.needs import Ended, Need, NextRound
from chorale.turns.request import TurnRequest, turn_request
from chorale.turns.routed_experts import routed_experts
from chorale.turns.rules import TurnRules

# An order to the engine: run a further round, or abort a choice (request id, index), which is complete.
Order = GenerateRequest | tuple[str, int]


class Work:
    """One prompt: its turn, and the outputs of the choices that have ended."""

    __slots__ = ("done", "output", "params", "turn")

    def __init__(self, prompt: Prompt, params: SamplingParams, turn: TurnRequest) -> None:
        self.params, self.turn = params, turn
        self.output = RequestOutput(turn.request_id, prompt.text, prompt.token_ids, [])
        self.done: dict[int, CompletionOutput] = {}


class Reading:
    """A choice that the engine is generating.

    Without stop strings, only the last chunk of a raw choice affects what the engine does next. Tokens are
    therefore collected in ``unread`` and read together at the end.
    """

    __slots__ = ("choice", "logprobs", "num_rounds", "reads_late", "request_id", "unread", "work")

    def __init__(self, work: Work, choice: Choice | RawChoice) -> None:
        self.work, self.choice = work, choice
        self.request_id: str | None = work.turn.request_id  # current round; None: ended
        self.num_rounds = 0  # not counting the first
        self.reads_late = isinstance(choice, RawChoice) and not work.turn.stop
        self.unread: TokenChunk | None = None
        self.logprobs: list[TokenLogprobs] = []


class Batch:
    """The prompts of one call. ``take`` gets a chunk per row after every step, so it must be cheap."""

    def __init__(self, vocab: Vocabulary, info: EngineInfo, metrics: LlmMetrics) -> None:
        self.num_done = 0  # prompts whose choices have all ended
        self._vocab, self._metrics = vocab, metrics
        self._max_model_len, self._eos = info.max_model_len, frozenset(info.eos_token_ids)
        self._works: list[Work] = []
        self._readings: dict[str, Sequence[Reading]] = {}  # by request id of the round

    def add(self, prompt: Prompt, params: SamplingParams, turn: TurnRequest) -> None:
        work = Work(prompt, params, turn)
        self._works.append(work)
        self._readings[turn.request_id] = [Reading(work, self._choice(work, i)) for i in range(params.n)]

    def _choice(self, work: Work, index: int) -> Choice | RawChoice:
        if not work.turn.rules.raw:
            return Choice(self._vocab, work.turn, index, self._eos)
        return RawChoice(
            self._vocab,
            work.turn,
            index,
            self._eos,
            skip_special_tokens=work.params.skip_special_tokens,
            hide_stop=not work.params.include_stop_str_in_output,
        )

    def __len__(self) -> int:
        return len(self._works)

    def params(self) -> list[SamplingParams]:
        return [work.params for work in self._works]

    def requests(self) -> Iterator[GenerateRequest]:
        """Return the first round of each turn that has not ended, in order."""
        return (work.turn.first_round() for work in self._works if len(work.done) < work.turn.sampling.n)

    def abort(self) -> None:
        """End all choices with ``finish_reason`` "abort"; none has begun."""
        for request in self.requests():
            self.take([TokenChunk(request.request_id, i, [], "abort") for i in range(request.sampling.n)])

    def outputs(self) -> list[RequestOutput]:
        """Return the outputs in the order in which their prompts were added."""
        return [work.output for work in self._works]

    def take(self, chunks: list[TokenChunk]) -> list[Order]:
        """Read a step's chunks. Returns orders to the engine."""
        orders: list[Order] = []
        readings = self._readings
        for chunk in chunks:
            reading = readings[chunk.request_id][chunk.index]
            unread = reading.unread
            is_plain = chunk.finish_reason is None and chunk.logprobs is None and not chunk.weight_version
            if unread is not None and is_plain:
                unread.token_ids += chunk.token_ids
                _add_experts(unread, chunk)
            elif chunk.request_id == reading.request_id:  # else it belongs to an earlier round
                self._read(reading, chunk, orders)
        return orders

    def _read(self, reading: Reading, chunk: TokenChunk, orders: list[Order]) -> None:
        if chunk.logprobs is not None:
            reading.logprobs += chunk.logprobs
            chunk.logprobs = None
        is_last = chunk.finish_reason is not None
        if reading.unread is not None and chunk.weight_version:  # it begins a span
            reading.choice.feed(reading.unread)
            reading.unread = None
        if reading.reads_late:
            chunk = _joined(reading.unread, chunk)
            reading.unread = None if is_last else chunk
            if not is_last:
                return
        need = reading.choice.feed(chunk)
        if need is not None:
            if not is_last:
                orders.append((chunk.request_id, chunk.index))
            self._continue(reading, need, orders)

    def _continue(self, reading: Reading, need: Need, orders: list[Order]) -> None:
        choice = reading.choice
        if isinstance(need, NextRound):
            assert isinstance(choice, Choice)
            del reading.logprobs[need.num_sampled :]
            turn, number = reading.work.turn, reading.num_rounds
            request = turn.later_round(need, choice.index, number, self._max_model_len)
            if request is not None:
                choice.begin_round(need)
                reading.request_id, reading.num_rounds = request.request_id, number + 1
                self._readings[request.request_id] = (reading,)
                orders.append(request)
                return
            need = choice.end("length")
        assert isinstance(need, Ended)  # LLM has no built-in tools and no compaction
        reading.request_id = None
        self._end(reading)

    def _end(self, reading: Reading) -> None:
        work, index = reading.work, reading.choice.index
        fold, output = Fold(), work.output
        fold.add(reading.choice.take())
        ended = fold.ended
        assert ended is not None
        self._metrics.choice_ended(work.turn, index, ended)
        work.done[index] = completion_output(index, fold, ended, reading.logprobs, work.params, self._vocab)
        work.done[index].routed_experts = routed_experts(work.turn, ended)
        work.done[index].weight_versions = [WeightVersionSpan(*span) for span in ended.weight_versions]
        output.num_cached_tokens = max(output.num_cached_tokens, ended.usage.cached_tokens)
        if ended.prompt_logprobs is not None and output.prompt_logprobs is None:
            scored = (
                None if entry is None else position_logprobs(entry, self._vocab)
                for entry in ended.prompt_logprobs
            )
            output.prompt_logprobs = FlatLogprobs(scored) if work.params.flat_logprobs else list(scored)
        if len(work.done) == work.turn.sampling.n:
            output.outputs = [work.done[each] for each in sorted(work.done)]
            self.num_done += 1


def _add_experts(chunk: TokenChunk, following: TokenChunk) -> None:
    if chunk.routed_experts is not None and following.routed_experts is not None:
        chunk.routed_experts += following.routed_experts


def _joined(chunk: TokenChunk | None, following: TokenChunk) -> TokenChunk:
    """Append ``following`` to ``chunk``, and return the result."""
    if chunk is None:
        return following
    chunk.token_ids += following.token_ids
    _add_experts(chunk, following)
    chunk.finish_reason, chunk.stop_token_id = following.finish_reason, following.stop_token_id
    chunk.timings, chunk.error = following.timings, following.error
    return chunk


def make_turn(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    rules: TurnRules,
    info: EngineInfo,
    vocab: Vocabulary,
) -> TurnRequest:
    """Return the turn of a prompt. Raises ``ValueError`` for parameters that the engine would refuse, and
    ``ContextLengthError`` for a prompt that is too long."""
    check_prompt(prompt, info)
    check_for(params, info)
    try:
        turn = turn_request(
            params,
            info,
            vocab,
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            rules=rules,
            max_tokens=info.max_model_len if params.max_tokens is None else params.max_tokens,
            n=params.n,
            logprobs=params.logprobs,
            logprob_token_ids=params.logprob_token_ids,
            prompt_logprobs=params.prompt_logprobs,
            routed_experts_start=params.routed_experts_prompt_start,
            stop=params.stop_strings,
            cache_salt=prompt.cache_salt,
        )
    except ContextLengthError:
        raise
    except RequestError as error:
        raise ValueError(error.message) from None
    sampling = msgspec.structs.replace(
        turn.sampling, skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache)
    )
    turn = dataclasses.replace(turn, sampling=sampling)
    for constraint in turn.grammar_parts:
        check_compiles(constraint)
    fault = sampling_fault(turn.sampling, info.vocab_size)
    if fault is not None:
        raise ValueError(fault)
    return turn
