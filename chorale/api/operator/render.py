"""The render endpoints return a prompt's token ids without generating.

A gateway that routes by prefix computes block hashes from the ids (docs/reference/kv-events.md). The format
is vLLM's: a body of /inference/v1/generate, and for a completion a list with one for each prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.chat.prepare import prepare
from chorale.api.chat.request import ChatRequest, parse_chat
from chorale.api.completions.endpoint import prepare_turns
from chorale.api.completions.request import CompletionRequest, parse_completion
from chorale.api.http.auth import request_id
from chorale.api.http.responses import large_response, read_as
from chorale.api.limits import SIZES
from chorale.api.messages.prepare import prepare as prepare_message
from chorale.api.messages.request import MessagesRequest, parse_messages
from chorale.api.operator.tokenize import HEAVY_TOKENS
from chorale.api.responses.prepare import prepare as prepare_response
from chorale.api.responses.request import ResponsesRequest, parse_request
from chorale.api.state import ServerState, check_model
from chorale.errors import invalid
from chorale.grammar.constraint import Constraint
from chorale.harmony.vocab import Vocabulary
from chorale.turns.built_in.open import close_tools
from chorale.turns.functions import Function
from chorale.turns.request import TurnRequest

# Fields of vLLM's ``sampling_params`` that have the same names in ``SamplingSpec``.
_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "max_tokens", "min_tokens", "ignore_eos", "seed", "logprobs", "prompt_logprobs",
)  # fmt: skip


async def render_chat(state: ServerState, request: Request) -> Response:
    """Returns the prompt of the chat's first round. Raises the same errors as the chat endpoint."""
    chat, name = await read_as(request, state.config, lambda data: (parse_chat(data), _name(request, data)))
    check_model(state, chat.model)
    turn = await prepare(state, chat, request.state.owner)
    await close_tools(turn.tools)  # nothing is submitted to the engine
    turn = replace(turn, request_id=f"chatcmpl-{name}")
    return await large_response(lambda: _placed(state, chat, turn), heavy=_is_heavy([turn]))


async def render_completion(state: ServerState, request: Request) -> Response:
    """Returns each prompt of the completion. Raises the same errors as the completions endpoint."""
    completion, name = await read_as(
        request, state.config, lambda data: (parse_completion(data), _name(request, data))
    )
    check_model(state, completion.model)
    prepared = await prepare_turns(state, completion, request.state.owner)
    ends = [f"-{index}" for index in range(len(prepared))] if len(prepared) > 1 else [""]
    turns = [
        replace(one.turn, request_id=f"cmpl-{name}{end}") for one, end in zip(prepared, ends, strict=True)
    ]
    texts = [bool(one.text) for one in prepared]
    return await large_response(
        lambda: [_placed(state, completion, *each) for each in zip(turns, texts, strict=True)],
        heavy=_is_heavy(turns),
    )


async def render_message(state: ServerState, request: Request) -> Response:
    """Returns the prompt of a message. Raises the same errors as the messages endpoint."""
    message = await read_as(request, state.config, parse_messages)
    check_model(state, message.model)
    turn = await prepare_message(state, message, request.state.owner)
    return await large_response(lambda: _rendered(state, message, turn), heavy=_is_heavy([turn]))


async def render_response(state: ServerState, request: Request) -> Response:
    """Returns the prompt of the response's first round. Raises the same errors as the responses endpoint."""
    asked = await read_as(request, state.config, parse_request)
    check_model(state, asked.model)
    prepared = await prepare_response(state, asked, request.state.owner)
    await prepared.prompt.close()
    turn = prepared.turn
    return await large_response(lambda: _rendered(state, asked, turn), heavy=_is_heavy([turn]))


def _name(request: Request, data: Mapping[str, Any]) -> str:
    """Returns the client's id of the request, or a new one. As in vLLM, the header precedes the body."""
    name = data.get("request_id")
    if name is None or "x-request-id" in request.headers:
        return request_id(request.scope)
    if not isinstance(name, str) or not 0 < len(name) <= SIZES["identifier"].max:
        raise invalid("request_id", f"must be a string of 1 to {SIZES['identifier'].max} characters")
    return name


def _is_heavy(turns: Sequence[TurnRequest]) -> bool:
    return sum(len(turn.prompt_token_ids) for turn in turns) > HEAVY_TOKENS


def _placed(
    state: ServerState, asked: ChatRequest | CompletionRequest, turn: TurnRequest, has_text: bool = True
) -> dict[str, Any]:
    """Adds the offsets of the tokens if requested. A prompt of ids has no text."""
    wanted = asked.return_token_offsets and has_text
    offsets = _offsets(state.vocab, turn.prompt_token_ids) if wanted else None
    return _rendered(state, asked, turn) | {"token_offsets": offsets}


def _offsets(vocab: Vocabulary, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Returns where each token begins and ends in the text, in characters. A part of a character counts as
    all of it."""
    found, end = [], 0
    for data in map(vocab.token_bytes, ids):
        begin = end - (data[:1] > b"\x7f" and data[:1] < b"\xc0")  # a character has begun before this token
        end += sum(byte & 0xC0 != 0x80 for byte in data)
        found.append((begin, end))
    return found


def _rendered(
    state: ServerState,
    asked: ChatRequest | CompletionRequest | MessagesRequest | ResponsesRequest,
    turn: TurnRequest,
) -> dict[str, Any]:
    """Returns the body of /inference/v1/generate, as vLLM does.

    ``cache_salt``: the engine's; with API keys, each key has its own.
    """
    spec, answer = turn.sampling, turn.rules.answer
    sampling: dict[str, Any] = {name: getattr(spec, name) for name in _SAMPLING}
    sampling |= {
        "stop": list(turn.stop),
        "stop_token_ids": list(spec.stop_token_ids),
        "include_stop_str_in_output": turn.include_stop,
        "logit_bias": spec.logit_bias or None,
        "allowed_token_ids": spec.allowed_token_ids,
        "logprob_token_ids": list(spec.logprob_token_ids) or None,
        "bad_words": asked.bad_words,
        "skip_special_tokens": getattr(asked, "skip_special_tokens", True),
        "thinking_token_budget": turn.rules.thinking_budget,
        "structured_outputs": None if answer is None else _structured(answer),
    }
    openai = isinstance(asked, ChatRequest | CompletionRequest)
    options = getattr(asked, "stream_options", None) if openai and asked.stream else None
    return {
        "request_id": turn.request_id,
        "token_ids": turn.prompt_token_ids,
        "features": None,
        "sampling_params": sampling,
        "model": asked.model or state.model_names[0],
        "stream": bool(asked.stream),
        "stream_options": options.model_dump(exclude_none=True) if options is not None else None,
        "return_token_ids": getattr(asked, "return_token_ids", False),
        "cache_salt": turn.cache_salt or None,
        "priority": turn.priority,
        "kv_transfer_params": None,
        "parse_context": None if turn.rules.raw else _context(asked, turn),
        "reasoning_ended": False,  # a constraint applies after the reasoning, as in the endpoint asked
    }


def _structured(answer: Constraint) -> dict[str, Any]:
    if not answer.is_json:
        return {"grammar": answer.body}
    return {"json": json.loads(answer.body), "disable_any_whitespace": answer.tight}


def _context(asked: Any, turn: TurnRequest) -> dict[str, Any] | None:
    """Returns what constrains and parses the answer's calls, or None if a chat cannot express it."""
    if isinstance(asked, ChatRequest):
        functions = [{"type": "function", "function": each} for each in asked.functions or ()]
        tools = [*(asked.tools or ()), *functions]
        choice: Any = asked.function_call if asked.tool_choice is None else asked.tool_choice
    else:
        if any(each.form is not None or each.text is not None for each in turn.rules.functions):
            return None
        tools = [_function(each) for each in turn.rules.functions]
        choice, names = turn.rules.choice.mode, turn.rules.choice.names
        if tools and names is not None:
            listed = [{"type": "function", "function": {"name": name}} for name in sorted(names)]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice, "tools": listed}}
    return {
        "tools": tools or None,
        "tool_choice": choice if tools else None,
        "parallel_tool_calls": turn.parallel_tool_calls,
        "include_reasoning": getattr(asked, "include_reasoning", True),
        "chat_template_kwargs": {},
        "history_tool_call_cnt": 0,
    }


def _function(function: Function) -> dict[str, Any]:
    tool = function.tool
    declared = {"name": tool.name, "description": tool.description, "strict": function.strict}
    if tool.parameters is not None:
        declared["parameters"] = tool.parameters
    return {"type": "function", "function": declared}
