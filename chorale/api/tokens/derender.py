"""The derender endpoints: answers of /inference/v1/generate become answers of chats and completions.

The choices of turns read the tokens, as they read those of an engine, in a thread: long answers take a while.
A stream's chunk is read after all tokens before it, which the client sends with each chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.answer import Writer
from chorale.api.chat.body import ChatAnswer
from chorale.api.chat.prepare import continue_prompt, read_client_rules, split_continued, turn_of
from chorale.api.chat.request import parse_chat
from chorale.api.completions.endpoint import prompt_turn
from chorale.api.completions.request import CompletionRequest, PromptTurn, parse_completion
from chorale.api.completions.text import TextAnswer
from chorale.api.fields import parse
from chorale.api.http.responses import large_response, read_as
from chorale.api.state import ServerState, check_model
from chorale.api.tokens.generated import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    Generated,
    GeneratedChoice,
    chat_choice,
    choice_chunk,
    chunk_of,
    folded,
    num_candidates,
    play,
)
from chorale.api.usage import NO_METRICS, usage_object
from chorale.engine.types import TokenChunk, TokenLogprobs
from chorale.errors import RequestError, invalid, unsupported
from chorale.requests.readers import within
from chorale.turns.choice.choice import Choice
from chorale.turns.choice.raw_choice import RawChoice
from chorale.turns.events import Usage
from chorale.turns.request import TurnRequest
from chorale.turns.rules import TurnRules

_TEXTS = ("content", "text", "reasoning", "reasoning_content")  # keys of chunks whose values are joined


async def derender_chat(state: ServerState, request: Request) -> Response:
    asked = await read_as(request, state.config, partial(parse, DerenderChatRequest))
    check_model(state, asked.model)
    return await large_response(lambda: _chat(state, asked), heavy=True)


async def derender_completion(state: ServerState, request: Request) -> Response:
    asked = await read_as(request, state.config, partial(parse, DerenderCompletionRequest))
    check_model(state, asked.model)
    return await large_response(lambda: _completion(state, asked), heavy=True)


def _chat(state: ServerState, asked: DerenderChatRequest) -> dict[str, Any]:
    name, given = _given(asked, "generate_response")
    prompt = given.prompt(asked.prompt_token_ids, asked.prompt_tokens)
    with within(lambda param: f"chat_request.{param}".rstrip(".")):
        chat = parse_chat(asked.chat_request)
        chat.take_defaults(state.config)
        chat.stream, chat.n = asked.stream, max(1, len(given.choices))
        if not chat.logprobs:
            chat.top_logprobs = num_candidates(given.choices, state.client.info.max_logprobs)
            chat.logprobs = chat.top_logprobs is not None
        tail = split_continued(chat)[1]
        header = () if tail is None else continue_prompt([], tail, state.vocab)
        turn = turn_of(state, chat, prompt, read_client_rules(chat), header)
    answer = ChatAnswer.of(state, chat, [turn], id=given.request_id)
    if asked.stream:
        start: dict[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": None}
        empty = answer.chunk([start])
        writers = [answer.writer(0, each.index) for each in given.choices]
        return _next_chunk(state, asked, given, len(prompt), chat_choice(state, turn), writers, empty)
    chunks = _whole(state, given, f"{name}.choices")
    body = answer.body([[folded(chat_choice(state, turn), each) for each in chunks]])
    _keep_reasons(body, given.choices)
    return body | {"prompt_logprobs": given.prompt_logprobs}


def _completion(state: ServerState, asked: DerenderCompletionRequest) -> dict[str, Any]:
    name, found = _given(asked, "generate_responses")
    given: list[Generated] = [found] if asked.stream else found
    counts = _each(asked.prompt_tokens, len(given), asked.stream, "prompt_tokens")
    known = _each(asked.prompt_token_ids, len(given), asked.stream, "prompt_token_ids")
    prompts = [each.prompt(known[place], counts[place]) for place, each in enumerate(given)]
    with within(lambda param: f"completion_request.{param}".rstrip(".")):
        completion = parse_completion(asked.completion_request)
        completion.take_defaults(state.config)
        if completion.echo and completion.logprobs is not None:
            raise unsupported("echo", "cannot be combined with logprobs")
        if completion.logprobs is None and not completion.echo:
            choices = [choice for each in given for choice in each.choices]
            completion.logprobs = num_candidates(choices, state.client.info.max_logprobs)
        completion.stream, completion.n = asked.stream, 1 if asked.stream else completion.n
        prepared = [_prompt_turn(state, completion, each) for each in prompts]
    more = {"metrics": NO_METRICS, "id": given[0].request_id}
    answer = TextAnswer.of_prompts(state, completion, prepared, **more)
    if asked.stream:
        choice = raw_choice(state, prepared[0].turn, completion)
        empty = answer.chunk([{"text": "", "logprobs": None, "finish_reason": None}])
        writers = [answer.writer(0, each.index) for each in found.choices]
        return _next_chunk(state, asked, found, len(prompts[0]), choice, writers, empty)
    folds = []
    for place, (each, one) in enumerate(zip(given, prepared, strict=True)):
        if len(each.choices) != completion.n:
            raise invalid(f"{name}[{place}].choices", f"must be {completion.n} (n)")
        chunks = _whole(state, each, f"{name}[{place}].choices")
        folds.append([folded(raw_choice(state, one.turn, completion), chunk) for chunk in chunks])
    body = answer.body(folds)
    _keep_reasons(body, [choice for each in given for choice in each.choices])
    if completion.prompt_logprobs is not None:
        for place, choice in enumerate(body["choices"]):
            choice["prompt_logprobs"] = given[place // completion.n].prompt_logprobs
    return body


def _keep_reasons(body: dict[str, Any], given: Iterable[GeneratedChoice]) -> None:
    """Sets the stop reasons that the engine gave."""
    for choice, each in zip(body["choices"], given, strict=True):
        choice["stop_reason"] = each.stop_reason


def _whole(state: ServerState, given: Generated, path: str) -> list[TokenChunk]:
    """Returns all tokens of each choice. Raises ``RequestError``."""
    choice: GeneratedChoice
    for place, choice in enumerate(_require(given.choices, path)):
        if choice.index != place or not choice.token_ids:
            raise invalid(f"{path}[{place}]", "must have its position as index, and tokens")
        choice.finish_reason = choice.finish_reason or "stop"
    return [choice_chunk(state, choice, given.num_cached) for choice in given.choices]


def _prompt_turn(state: ServerState, completion: CompletionRequest, prompt: list[int]) -> PromptTurn:
    text = state.vocab.decode(prompt) if completion.echo else ""
    return prompt_turn(state, completion, (prompt, text), TurnRules(raw=True), b"")


def _next_chunk(
    state: ServerState,
    asked: DerenderChatRequest | DerenderCompletionRequest,
    given: Generated,
    num_prompt_tokens: int,
    choice: Choice | RawChoice,
    writers: Sequence[Writer],
    found: dict[str, Any],
) -> dict[str, Any]:
    """Returns the chunk, and the state for the next one. ``writers``: one, or none without a choice;
    ``found``: a chunk without content."""
    before = list(asked.stream_state.output_token_ids) if asked.stream_state is not None else []
    for chosen, writer in zip(given.choices, writers, strict=True):
        # Of earlier log-probabilities, only the places of their tokens matter.
        scores = [TokenLogprobs(each, 0.0, 1, [], []) for each in before] if chosen.logprobs else None
        if before:
            writer.feed(play(choice, chunk_of(state, before, logprobs=scores)))
        for line in writer.feed(play(choice, choice_chunk(state, chosen))).decode().split("\n"):
            if line.startswith("data: {"):
                _merge(found, json.loads(line[6:]))
        found["choices"][0]["index"] = chosen.index
        if chosen.finish_reason is not None:
            _keep_reasons(found, [chosen])
        before += chosen.token_ids
    if not given.choices:
        found["choices"] = []
    if given.usage is not None:
        usage = Usage(num_prompt_tokens, given.num_cached, given.usage.completion_tokens)
        found["usage"] = usage_object(usage)
    return {"chunk": found, "stream_state": {"output_token_ids": before}}


def raw_choice(state: ServerState, turn: TurnRequest, completion: CompletionRequest) -> RawChoice:
    eos = frozenset(state.client.info.eos_token_ids)
    return RawChoice(state.vocab, replace(turn, stream_interval=1), 0, eos, **completion.raw_options)


def _merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds the content of a chunk to another."""
    for key, value in part.items():
        found = whole.get(key)
        if key == "choices":
            _merge(whole[key][0], value[0])
        elif found is None:
            whole[key] = value
        elif isinstance(value, dict):
            _merge(found, value)
        elif isinstance(value, list) or (key in _TEXTS and value is not None):
            whole[key] = found + value
        elif value is not None:
            whole[key] = value


def _given(asked: DerenderChatRequest | DerenderCompletionRequest, name: str) -> tuple[str, Any]:
    """Returns the name and the value of the field with the answer or, with ``stream``, the chunk."""
    name = "generate_chunk" if asked.stream else name
    value = _require(getattr(asked, name), name)
    if asked.stream and len(value.choices) > 1:
        raise invalid("generate_chunk.choices", "must have at most one choice")
    return name, value


def _require(value: Any, param: str) -> Any:
    if not value:
        raise RequestError(f"{param}: is required", param=param, code="missing_required_parameter")
    return value


def _each(value: Any, count: int, streams: bool, param: str) -> Sequence[Any]:
    """Returns the values of all prompts. A chunk has one prompt and its value alone."""
    is_list = isinstance(value, list) and not (value and isinstance(value[0], int) and param.endswith("ids"))
    if value is not None and (is_list == streams or (is_list and len(value) != count)):
        raise invalid(param, "must be that of the prompt" if streams else f"must be a list of {count}")
    return [value] * count if streams or value is None else value
