"""/v1/chat/completions/render and /v1/completions/render return a prompt's token ids without generating.

A gateway that routes by prefix computes block hashes from the ids (docs/reference/kv-events.md). The format
is vLLM's: an engine request for a chat, and a list with one for each prompt of a completion.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.chat.prepare import prepare
from chorale.api.chat.request import ChatRequest, parse_chat
from chorale.api.completions.endpoint import prepare_turns
from chorale.api.completions.request import CompletionRequest, parse_completion
from chorale.api.http.responses import large_response, read_as
from chorale.api.state import ServerState, check_model
from chorale.turns.built_in.open import close_tools
from chorale.turns.request import TurnRequest

_HEAVY_TOKENS = 8 * 1024
# Fields of vLLM's ``sampling_params`` that have the same names in ``SamplingSpec``.
_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "max_tokens", "min_tokens", "ignore_eos", "seed", "logprobs", "prompt_logprobs",
)  # fmt: skip


def routes(state: ServerState) -> list[Route]:
    return [
        Route("/v1/chat/completions/render", partial(render_chat, state), methods=["POST"]),
        Route("/v1/completions/render", partial(render_completion, state), methods=["POST"]),
    ]


async def render_chat(state: ServerState, request: Request) -> Response:
    """Returns the prompt of the chat's first round. Raises the same errors as the chat endpoint."""
    chat = await read_as(request, state.config, parse_chat)
    check_model(state, chat.model)
    turn = await prepare(state, chat, request.state.owner)
    await close_tools(turn.tools)  # nothing is submitted to the engine
    return await large_response(
        lambda: _rendered(state, chat, turn), heavy=len(turn.prompt_token_ids) > _HEAVY_TOKENS
    )


async def render_completion(state: ServerState, request: Request) -> Response:
    """Returns each prompt of the completion. Raises the same errors as the completions endpoint."""
    completion = await read_as(request, state.config, parse_completion)
    check_model(state, completion.model)
    turns = [one.turn for one in await prepare_turns(state, completion, request.state.owner)]
    return await large_response(
        lambda: [_rendered(state, completion, turn) for turn in turns],
        heavy=sum(len(turn.prompt_token_ids) for turn in turns) > _HEAVY_TOKENS,
    )


def _rendered(
    state: ServerState, asked: ChatRequest | CompletionRequest, turn: TurnRequest
) -> dict[str, Any]:
    """Returns vLLM's engine request. ``cache_salt``: the engine's; with API keys, each key has its own."""
    sampling: dict[str, Any] = {name: getattr(turn.sampling, name) for name in _SAMPLING}
    sampling["stop"] = list(turn.stop)
    sampling["stop_token_ids"] = list(turn.sampling.stop_token_ids)
    options = asked.stream_options if asked.stream else None
    return {
        "request_id": turn.request_id,
        "token_ids": turn.prompt_token_ids,
        "features": None,
        "sampling_params": sampling,
        "model": asked.model or state.model_names[0],
        "stream": bool(asked.stream),
        "stream_options": options.model_dump(exclude_none=True) if options is not None else None,
        "cache_salt": turn.cache_salt or None,
        "priority": turn.priority,
        "kv_transfer_params": None,
    }
