"""TurnRequest: all parameters of a turn, built here from any endpoint's fields.

``turn_request`` resolves sampling and the grammar; ``check_grammar`` compiles the grammar's parts before the
request reaches an engine. The requests of single rounds are also made here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import msgspec

from chorale.client.base import EngineInfo
from chorale.config.seeds import choice_seed
from chorale.engine.types import BASE, AdapterRef, GenerateRequest, SamplingSpec
from chorale.errors import unsupported
from chorale.grammar.checker import GrammarChecker
from chorale.grammar.constraint import Constraint
from chorale.grammar.frames import MAX_GRAMMAR_BYTES
from chorale.harmony.vocab import Vocabulary
from chorale.turns.built_in.open import ApprovedCall, TurnTools
from chorale.turns.compaction import Compaction
from chorale.turns.needs import Compact, NextRound
from chorale.turns.record import Recorder
from chorale.turns.rules import FREE, TurnRules
from chorale.turns.sampling import Details, TurnFields, resolve_sampling

NEVER = 1 << 30  # tokens; turns that are not streamed are read once, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """``request_id`` is unique among requests in flight; ``tools`` is empty or has one entry per choice."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingSpec
    rules: TurnRules = FREE
    grammar_parts: Sequence[Constraint] = ()  # the constraints in ``sampling.grammar``
    stop: tuple[str, ...] = ()  # stop strings, on final text only
    include_stop: bool = False  # the stop string (or extra stop token) is part of the text
    parallel_tool_calls: bool = True  # False: the turn ends after the first call
    stream_interval: int = 1  # tokens per wake-up after the first
    # The header (after <|start|>assistant) of an open message with which the prompt ends.
    prefill_token_ids: tuple[int, ...] = ()
    progress: bool = False  # emit TurnProgress
    priority: int = 0
    cache_salt: str = ""
    adapter: AdapterRef = BASE
    arrival_time: float = 0.0
    tools: tuple[TurnTools, ...] = ()
    approved: tuple[ApprovedCall, ...] = ()  # run before the first round
    compaction: Compaction | None = None
    recorder: Recorder | None = None  # see ``recorded``
    expert_shape: tuple[int, int] | None = None  # layers, experts per token; None: not part of the answer

    def first_round(self) -> GenerateRequest:
        """Returns the generation that all choices share."""
        return self._generate(self.request_id, self.prompt_token_ids, self.sampling)

    def later_round(
        self, following: NextRound, index: int, number: int, max_model_len: int
    ) -> GenerateRequest | None:
        """Returns round ``number`` of choice ``index``, or None if there is no room for a token."""
        first = self.sampling
        room = max_model_len - len(following.prompt_token_ids)
        if first.max_tokens is not None:
            room = min(room, first.max_tokens - following.num_sampled)
        if room < 1:
            return None
        sampling = msgspec.structs.replace(
            first,
            n=1,
            max_tokens=room,
            min_tokens=max(0, min(first.min_tokens - following.num_sampled, room)),
            seed=None if first.seed is None else choice_seed(first.seed, index),
            prompt_logprobs=None,
            routed_experts_start=None,
            grammar=following.grammar,
            grammar_context=following.num_own_tokens if following.grammar else 0,
        )
        return self._generate(f"{self.request_id}.{index}.{number}", following.prompt_token_ids, sampling)

    def summary_round(self, need: Compact, suffix: str, sampling: SamplingSpec) -> TurnRequest:
        """Returns a turn that writes a summary, with this one's priority and cache key only."""
        return TurnRequest(
            request_id=f"{self.request_id}.{suffix}",
            prompt_token_ids=need.prompt_token_ids,
            sampling=sampling,
            priority=self.priority,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            arrival_time=self.arrival_time,
        )

    def _generate(self, request_id: str, prompt: list[int], sampling: SamplingSpec) -> GenerateRequest:
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=self.priority,
            arrival_time=self.arrival_time or time.time(),
            cache_salt=self.cache_salt,
            adapter=self.adapter,
        )


def turn_request(
    fields: TurnFields,
    info: EngineInfo,
    vocab: Vocabulary,
    *,
    request_id: str,
    prompt_token_ids: list[int],
    rules: TurnRules,
    max_tokens: int | None,
    stop: Sequence[str] | None = None,
    parallel_tool_calls: bool = True,
    stream_interval: int | None = None,
    prefill_token_ids: tuple[int, ...] = (),
    progress: bool = False,
    cache_salt: str = "",
    adapter: AdapterRef = BASE,
    tools: tuple[TurnTools, ...] = (),
    approved: Sequence[ApprovedCall] = (),
    compaction: Compaction | None = None,
    **details: Unpack[Details],
) -> TurnRequest:
    """``stream_interval`` None: events are read once, at the end; ``stop``: instead of ``fields.stop``.

    Raises ``RequestError`` for incompatible fields, ``ContextLengthError`` for a prompt without room.
    """
    start = prompt_token_ids if compaction is None else compaction.answered_prompt(prompt_token_ids)
    sampling = resolve_sampling(
        fields, info, vocab, num_prompt_tokens=len(start), max_tokens=max_tokens, details=details
    )
    if rules.binds:
        _check_unbound(sampling)
    grammar, parts = rules.grammar(sampling.max_tokens)
    if grammar:
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
    return TurnRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        rules=rules,
        grammar_parts=parts,
        stop=tuple(stop or fields.stop or ()),
        include_stop=bool(fields.include_stop_str_in_output),
        parallel_tool_calls=parallel_tool_calls,
        stream_interval=NEVER if stream_interval is None else stream_interval,
        prefill_token_ids=prefill_token_ids,
        progress=progress,
        priority=fields.priority or 0,
        cache_salt=cache_salt,
        adapter=adapter,
        arrival_time=time.time(),
        tools=tools,
        approved=tuple(approved),
        compaction=compaction,
        expert_shape=None if sampling.routed_experts_start is None else info.routed_experts,
    )


def _check_unbound(sampling: SamplingSpec) -> None:
    """Raises for fields that a grammar overrides: it alone decides on tokens and the end."""
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
        if getattr(sampling, name):
            raise unsupported(
                name, "cannot be combined with structured output, tool_choice or a thinking budget"
            )


async def check_grammar(checker: GrammarChecker, turn: TurnRequest) -> TurnRequest:
    """Returns ``turn``. Raises ``RequestError`` if a part of its grammar does not compile."""
    if not turn.sampling.grammar:
        return turn
    await checker.check(turn.grammar_parts)
    if len(turn.sampling.grammar.encode()) > MAX_GRAMMAR_BYTES:
        answer = turn.rules.answer
        raise unsupported(
            answer.param if answer is not None else "tools",
            f"the schemas of this request have more than {MAX_GRAMMAR_BYTES} bytes together",
        )
    return turn
