"""Builds the TurnRequest for a prompt of ``LLM`` and its SamplingParams, and checks it."""

from __future__ import annotations

import dataclasses

import msgspec

from chorale.client.base import EngineInfo
from chorale.engine.admission import sampling_fault
from chorale.errors import ContextLengthError, RequestError
from chorale.harmony.vocab import Vocabulary
from chorale.llm.params import SamplingParams, check_compiles, check_for
from chorale.llm.prompts import Prompt, check_prompt
from chorale.turns.request import TurnRequest, turn_request
from chorale.turns.rules import TurnRules


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
