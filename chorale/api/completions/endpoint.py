"""POST /v1/completions: raw prompts to raw text. Each prompt is an engine request with n choices."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.answer import respond
from chorale.api.completions.request import (
    CompletionRequest,
    Prompt,
    PromptTurn,
    encode_prompts,
    parse_completion,
)
from chorale.api.completions.text import TextAnswer
from chorale.api.fields import wants_continuous_usage
from chorale.api.http.auth import cache_salt
from chorale.api.http.responses import read_as
from chorale.api.limits import check_scores
from chorale.api.record import recorded
from chorale.api.routed_experts import check_experts
from chorale.api.state import ServerState, select_model
from chorale.requests.formats import read_answer
from chorale.turns.request import check_grammar, turn_request
from chorale.turns.rules import TurnRules


async def create(state: ServerState, request: Request) -> Response:
    completion = await read_as(request, state.config, parse_completion)
    completion.take_defaults(state.config)
    state = select_model(state, completion.model)
    prepared = await prepare_turns(state, completion, request.state.owner)
    answer = TextAnswer.of_prompts(state, completion, prepared)
    return await respond(state, request, answer, stream=completion.stream)


async def prepare_turns(state: ServerState, completion: CompletionRequest, owner: bytes) -> list[PromptTurn]:
    """Returns a turn for each prompt. Raises ``RequestError``. ``owner``: the digest of the caller's key."""
    prompts = await encode_prompts(completion.prompt, state.vocab, echo=bool(completion.echo))
    answer = read_answer(completion.response_format, completion, "response_format")
    rules = TurnRules(raw=True, answer=answer.constraint)
    prepared = [prompt_turn(state, completion, prompt, rules, owner) for prompt in prompts]
    for one in prepared:
        await check_grammar(state.grammars, one.turn)
    check_experts(one.turn for one in prepared)
    return prepared


def prompt_turn(
    state: ServerState, completion: CompletionRequest, prompt: Prompt, rules: TurnRules, owner: bytes
) -> PromptTurn:
    """Returns a turn for one prompt. Raises ``RequestError``."""
    token_ids, text = prompt
    turn = turn_request(
        completion,
        state.client.info,
        state.vocab,
        request_id=f"cmpl-{secrets.token_hex(12)}",
        prompt_token_ids=token_ids,
        rules=rules,
        # The engine samples at least one token, which is discarded if max_tokens is 0.
        max_tokens=max(1, completion.max_tokens),
        n=completion.n,
        logprobs=completion.logprobs,
        logprob_token_ids=completion.logprob_token_ids,
        prompt_logprobs=completion.num_prompt_logprobs,
        routed_experts_start=completion.routed_experts_start,
        prompt_param="prompt",
        logprobs_param="logprobs",
        stream_interval=state.config.stream_interval if completion.stream else None,
        progress=completion.stream
        and (completion.return_token_ids or wants_continuous_usage(completion.stream_options)),
        cache_salt=cache_salt(owner, completion.cache_salt),
        adapter=state.adapter,
    )
    check_scores(len(token_ids), completion.num_prompt_logprobs)
    return PromptTurn(recorded(turn, completion.include_record), text)
