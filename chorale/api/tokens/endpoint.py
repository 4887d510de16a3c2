"""POST /inference/v1/generate and /inference/v1/abort_requests: tokens in, tokens out."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.answer import Folds, respond
from chorale.api.chat.body import ChatAnswer
from chorale.api.chat.prepare import read_client_rules
from chorale.api.chat.request import ChatRequest
from chorale.api.fields import parse
from chorale.api.http.auth import cache_salt
from chorale.api.http.offload import beside, is_heavy
from chorale.api.http.responses import read_as
from chorale.api.limits import check_scores
from chorale.api.routed_experts import check_experts
from chorale.api.state import ServerState, select_model
from chorale.api.tokens.answer import TokenAnswer
from chorale.api.tokens.generated import chat_choice, chunk_of, folded
from chorale.api.tokens.request import AbortRequest, GenerateRequest, parse_generate, placed
from chorale.engine.types import FinishReason
from chorale.errors import invalid
from chorale.requests.readers import within
from chorale.turns.request import TurnRequest, check_grammar, turn_request
from chorale.turns.rules import TurnRules

_PREFIX = "generate-tokens-"  # vLLM's, of the ids in answers


async def generate(state: ServerState, request: Request) -> Response:
    asked = await read_as(request, state.config, parse_generate)
    state = select_model(state, asked.model)
    owner = request.state.owner
    turn = await prepare(state, asked, owner)
    answer_id = f"{_PREFIX}{asked.request_id or secrets.token_hex(16)}"
    if asked.output_mode == "derender":
        return await respond(state, request, DerenderedAnswer(state, asked, turn, answer_id, owner))
    answer = TokenAnswer(state, asked, turn, answer_id, owner)
    return await respond(state, request, answer, stream=asked.stream)


async def abort(state: ServerState, request: Request) -> Response:
    """Aborts requests of the same API key by the ids of their answers. Unknown ids have no effect."""
    asked = await read_as(request, state.config, lambda data: parse(AbortRequest, data))
    keys = {(request.state.owner, _PREFIX + name.removeprefix(_PREFIX)) for name in asked.request_ids}
    for request_id in [request_id for request_id, key in state.lifecycle.generations.items() if key in keys]:
        state.client.abort(request_id)
    return Response(status_code=200)


async def prepare(state: ServerState, asked: GenerateRequest, owner: bytes) -> TurnRequest:
    """Prepares a turn. Raises ``RequestError``."""
    chat = asked.chat()
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
    if asked.is_chat:
        return rules
    if rules.thinking_budget is not None:
        raise invalid(
            "sampling_params.thinking_token_budget", "the prompt does not begin a turn of the model"
        )
    return TurnRules(raw=True, answer=rules.answer)


class DerenderedAnswer(TokenAnswer):
    """``output_mode`` "derender": messages of a chat. Hidden reasoning hides the tokens, too."""

    is_slow = True

    def body(self, folds: Folds) -> dict[str, Any]:
        body = super().body(folds)
        state, (turn,), chat = self.state, self.turns, self.asked.chat()
        of_chat = []
        for choice in body["choices"]:
            reason: FinishReason = "stop" if choice["finish_reason"] == "stop" else "length"
            chunk = chunk_of(state, choice["token_ids"], reason, choice["stop_reason"])
            of_chat.append(folded(chat_choice(state, turn), chunk))
        read = ChatAnswer.of(state, chat, [turn]).body([of_chat])
        for choice, found in zip(body["choices"], read["choices"], strict=True):
            del choice["text"]
            choice["message"] = found["message"]
            if choice["finish_reason"] != "abort":
                choice["finish_reason"] = found["finish_reason"]
            if not chat.include_reasoning:
                choice |= {"token_ids": None, "logprobs": None}
        return body
