"""POST /v1/completions: raw prompts to raw text. Each prompt is an engine request with n choices."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.completions.request import (
    CompletionRequest,
    Prompt,
    PromptTurn,
    encode_prompts,
    parse_completion,
)
from chorale.api.completions.text import ChoiceText, TextAnswer, TextChunkWriter, body_choice
from chorale.api.fields import wants_continuous_usage
from chorale.api.http.auth import cache_salt
from chorale.api.http.offload import beside
from chorale.api.http.responses import EventStream, large_response, read_as, until_disconnect
from chorale.api.http.sse import last_error
from chorale.api.limits import check_scores
from chorale.api.logprobs import is_scored
from chorale.api.record import record_field, recorded
from chorale.api.routed_experts import check_experts, expert_field
from chorale.api.state import ServerState, select_model
from chorale.api.usage import closing_fields
from chorale.errors import ChoraleError
from chorale.requests.formats import read_answer
from chorale.tracing.context import name_response
from chorale.turns.events import Fold, PromptScored
from chorale.turns.request import TurnRequest, check_grammar, turn_request
from chorale.turns.rules import TurnRules
from chorale.turns.run import Batches, ChoiceEvents, fold_together, run_raw, run_together


async def create(state: ServerState, request: Request) -> Response:
    completion = await read_as(request, state.config, parse_completion)
    completion.take_defaults(state.config)
    state = select_model(state, completion.model)
    prepared = await prepare_turns(state, completion, request.state.owner)
    text = TextAnswer.of(state, completion)
    name_response(text.id)
    if completion.stream:
        return EventStream(stream_text(state, prepared, text), on_error=last_error)
    body = await until_disconnect(request, complete_text(state, prepared, text))
    return await large_response(lambda: body, heavy=any(is_scored(one.turn.sampling) for one in prepared))


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


def _all_turns(
    state: ServerState, prepared: Sequence[PromptTurn], completion: CompletionRequest
) -> list[tuple[TurnRequest, Batches]]:
    """Returns each prompt's turn, and the batches of its events."""
    options = completion.raw_options
    return [(one.turn, run_raw(state.client, state.vocab, one.turn, **options)) for one in prepared]


async def complete_text(
    state: ServerState, prepared: Sequence[PromptTurn], answer: TextAnswer
) -> dict[str, Any]:
    """Returns the body. Raises the ``ChoraleError`` with which a choice ended."""
    folds = await fold_together(state.client, _all_turns(state, prepared, answer.request))
    scored = any(is_scored(one.turn.sampling) for one in prepared)
    body = await beside(lambda: text_body(prepared, folds, answer), heavy=scored)
    return body | record_field(state.client.info, [one.turn for one in prepared])


def text_body(
    prepared: Sequence[PromptTurn], folds: Sequence[Sequence[Fold]], answer: TextAnswer
) -> dict[str, Any]:
    completion = answer.request
    choices, ends = [], []
    for position, (one, of_prompt) in enumerate(zip(prepared, folds, strict=True)):
        ends.append([fold.result() for fold in of_prompt])
        for index, (fold, ended) in enumerate(zip(of_prompt, ends[-1], strict=True)):
            text = ChoiceText(answer, one, position * completion.n + index)
            choices.append(body_choice(text, fold, ended) | expert_field(one.turn, ended))
    return answer.chunk(choices) | closing_fields(ends, metrics=answer.metrics)


async def stream_text(
    state: ServerState, prepared: Sequence[PromptTurn], answer: TextAnswer
) -> AsyncGenerator[bytes]:
    """Yields the chunks of each batch of events, an error event if a choice failed, and ``[DONE]`` last."""
    completion = answer.request
    writers = [
        [
            TextChunkWriter(ChoiceText(answer, one, position * completion.n + index))
            for index in range(completion.n)
        ]
        for position, one in enumerate(prepared)
    ]
    sent, running = False, _all_turns(state, prepared, completion)
    try:
        async with aclosing(run_together(state.client, running)) as turns:
            async for position, batch in turns:
                data = await beside(
                    partial(_feed, writers[position], batch),
                    heavy=any(isinstance(each, PromptScored) for _, events in batch for each in events),
                )
                if data:
                    sent = True
                    yield data
    except ChoraleError as error:  # one prompt could not start
        if not sent:
            raise
        yield last_error(error)
        return
    ends = [[writer.ended for writer in row if writer.ended is not None] for row in writers]
    yield answer.conclusion(ends, record_field(state.client.info, [one.turn for one in prepared]))


def _feed(writers: Sequence[TextChunkWriter], batch: Sequence[ChoiceEvents]) -> bytes:
    return b"".join([writers[index].feed(events) for index, events in batch])
