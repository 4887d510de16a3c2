"""POST /inference/v1/generate and /inference/v1/abort_requests: tokens in, tokens out."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.chat.answer import Answer
from chorale.api.chat.body import chat_body
from chorale.api.chat.prepare import read_client_rules
from chorale.api.chat.request import ChatRequest
from chorale.api.fields import parse
from chorale.api.http.auth import cache_salt
from chorale.api.http.offload import beside, is_heavy
from chorale.api.http.responses import EventStream, large_response, read_as, until_disconnect
from chorale.api.http.sse import DONE, last_error
from chorale.api.limits import check_scores
from chorale.api.logprobs import is_scored
from chorale.api.routed_experts import check_experts
from chorale.api.state import ServerState, select_model
from chorale.api.tokens.answer import Piece, TokenAnswer
from chorale.api.tokens.generated import chat_choice, chunk_of, folded
from chorale.api.tokens.request import AbortRequest, GenerateRequest, parse_generate, placed
from chorale.engine.types import FinishReason
from chorale.errors import invalid
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import START
from chorale.requests.readers import within
from chorale.tracing.context import name_response
from chorale.turns.request import TurnRequest, check_grammar, turn_request
from chorale.turns.rules import TurnRules
from chorale.turns.run import ChoiceEvents, run_raw

_PREFIX = "generate-tokens-"  # vLLM's, of the ids in answers


async def generate(state: ServerState, request: Request) -> Response:
    asked = await read_as(request, state.config, parse_generate)
    state = select_model(state, asked.model)
    owner = request.state.owner
    chat = asked.chat()
    turn = await prepare(state, asked, chat, owner)
    answer = TokenAnswer(state, asked, turn, f"{_PREFIX}{asked.request_id or secrets.token_hex(16)}")
    name_response(answer.id)
    batches = _run(state, asked, turn, (owner, answer.id))
    if asked.stream:
        return EventStream(_stream(answer, batches), on_error=last_error)
    body = await until_disconnect(request, _complete(answer, batches))
    if asked.output_mode == "derender":
        return await large_response(lambda: _derender(state, chat, turn, body), heavy=True)
    return await large_response(lambda: body, heavy=is_scored(turn.sampling) or is_heavy(body))


async def abort(state: ServerState, request: Request) -> Response:
    """Aborts requests of the same API key by the ids of their answers. Unknown ids have no effect."""
    asked = await read_as(request, state.config, lambda data: parse(AbortRequest, data))
    keys = {(request.state.owner, _PREFIX + name.removeprefix(_PREFIX)) for name in asked.request_ids}
    for request_id in [request_id for request_id, key in state.lifecycle.generations.items() if key in keys]:
        state.client.abort(request_id)
    return Response(status_code=200)


def is_chat(asked: GenerateRequest) -> bool:
    """Returns whether the model begins a turn: constraints then apply to its answer, after its reasoning."""
    return asked.token_ids[-2:] == [START, ASSISTANT] and not asked.reasoning_ended


async def prepare(state: ServerState, asked: GenerateRequest, chat: ChatRequest, owner: bytes) -> TurnRequest:
    """Prepares a turn. ``chat``: the constraints of the request. Raises ``RequestError``."""
    sampling = asked.sampling_params
    heavy = is_heavy(asked.parse_context, sampling.structured_outputs)
    rules = await beside(lambda: _rules(asked, chat), heavy=heavy)
    with within(placed):
        turn = turn_request(
            sampling,
            state.client.info,
            state.vocab,
            request_id=f"gen-{secrets.token_hex(12)}",
            prompt_token_ids=asked.token_ids,
            rules=rules,
            max_tokens=sampling.max_tokens,
            n=sampling.n,
            logprobs=sampling.num_logprobs,
            logprob_token_ids=sampling.logprob_token_ids,
            prompt_logprobs=sampling.prompt_logprobs,
            prompt_param="token_ids",
            logprobs_param="logprobs",
            parallel_tool_calls=chat.parallel_tool_calls,
            stream_interval=state.config.stream_interval if asked.stream else None,
            progress=True,
            routed_experts_start=None if asked.stream else sampling.routed_experts_prompt_start,
            cache_salt=cache_salt(owner, asked.cache_salt),
            adapter=state.adapter,
        )
        check_scores(len(asked.token_ids), sampling.prompt_logprobs)
        check_experts([turn])
        return replace(await check_grammar(state.grammars, turn), priority=asked.priority or 0)


def _rules(asked: GenerateRequest, chat: ChatRequest) -> TurnRules:
    with within(placed):
        rules = read_client_rules(chat)
    if is_chat(asked):
        return rules
    if rules.thinking_budget is not None:
        raise invalid(
            "sampling_params.thinking_token_budget", "the prompt does not begin a turn of the model"
        )
    return TurnRules(raw=True, answer=rules.answer)


async def _run(
    state: ServerState, asked: GenerateRequest, turn: TurnRequest, key: tuple[bytes, str]
) -> AsyncGenerator[list[ChoiceEvents]]:
    running = state.lifecycle.generations
    running[turn.request_id] = key
    turns = run_raw(
        state.client,
        state.vocab,
        turn,
        skip_special_tokens=asked.sampling_params.skip_special_tokens,
        in_final=is_chat(asked) and asked.output_mode != "text",
    )
    try:
        async with aclosing(turns):
            async for batch in turns:
                yield batch
    finally:
        del running[turn.request_id]


async def _complete(answer: TokenAnswer, batches: AsyncGenerator[list[ChoiceEvents]]) -> dict[str, Any]:
    """Returns the body. Raises the ``ChoraleError`` with which a choice ended."""
    pieces = [Piece() for _ in range(answer.turn.sampling.n)]
    async with aclosing(batches):
        async for batch in batches:
            for index, events in batch:
                pieces[index].add(events)
    return await beside(lambda: answer.body(pieces), heavy=is_scored(answer.turn.sampling))


def _derender(
    state: ServerState, chat: ChatRequest, turn: TurnRequest, body: dict[str, Any]
) -> dict[str, Any]:
    """Replaces the texts by the messages of a chat, in place. Hidden reasoning hides the tokens, too."""
    folds = []
    for choice in body["choices"]:
        reason: FinishReason = "stop" if choice["finish_reason"] == "stop" else "length"
        chunk = chunk_of(state, choice["token_ids"], reason, choice["stop_reason"])
        folds.append(folded(chat_choice(state, turn), chunk))
    read = chat_body(Answer.of(state, chat), folds, turn)
    for choice, found in zip(body["choices"], read["choices"], strict=True):
        del choice["text"]
        choice["message"] = found["message"]
        if choice["finish_reason"] != "abort":
            choice["finish_reason"] = found["finish_reason"]
        if not chat.include_reasoning:
            choice |= {"token_ids": None, "logprobs": None}
    return body


async def _stream(answer: TokenAnswer, batches: AsyncGenerator[list[ChoiceEvents]]) -> AsyncGenerator[bytes]:
    """Yields the chunks of each batch of events, an error event if a choice failed, and ``[DONE]`` last."""
    ends = []
    async with aclosing(batches):
        async for batch in batches:
            data = b""
            for index, events in batch:
                piece = Piece()
                piece.add(events)
                data += answer.chunk(index, piece)
                if piece.ended is not None:
                    ends.append(piece.ended)
            if data:
                yield data
    error = next((ended.error for ended in ends if ended.error is not None), None)
    yield last_error(error) if error is not None else answer.last_chunk(ends) + DONE
