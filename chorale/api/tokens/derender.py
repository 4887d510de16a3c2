"""The derender endpoints: answers of /inference/v1/generate become answers of chats and completions.

A stream's chunk is read after all tokens before it, which the client sends with each chunk.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.chat.answer import Answer
from chorale.api.chat.endpoint import complete_chat, stream_chat
from chorale.api.chat.prepare import continue_prompt, read_client_rules, split_continued
from chorale.api.chat.request import ChatRequest, parse_chat
from chorale.api.completions.endpoint import PromptTurn, complete_text, stream_text
from chorale.api.completions.request import CompletionPrompt, CompletionRequest, parse_completion
from chorale.api.completions.text import TextAnswer
from chorale.api.fields import parse
from chorale.api.http.offload import beside, is_heavy
from chorale.api.http.responses import large_response, read_as
from chorale.api.state import ServerState, check_model
from chorale.api.tokens.generated import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    Generated,
    choice_chunks,
)
from chorale.api.tokens.played import Paused, Player, chunks_of
from chorale.api.usage import NO_METRICS, usage_object
from chorale.engine.types import TokenChunk, TokenLogprobs
from chorale.errors import RequestError, invalid, unsupported
from chorale.turns.direct import Direct
from chorale.turns.events import Usage
from chorale.turns.request import TurnRequest, turn_request
from chorale.turns.rules import TurnRules

_TEXTS = ("content", "text", "reasoning", "reasoning_content")  # keys of chunks whose values are joined
_TURN = "turn"  # the request of a chat to the engine


async def derender_chat(state: ServerState, request: Request) -> Response:
    asked = await read_as(request, state.config, partial(parse, DerenderChatRequest))
    check_model(state, asked.model)
    name = "generate_chunk" if asked.stream else "generate_response"
    given: Generated = _given(getattr(asked, name), name)
    prompt = given.prompt(asked.prompt_token_ids, asked.prompt_tokens)

    def read_chat() -> tuple[ChatRequest, TurnRequest]:
        with _within("chat_request"):
            chat = parse_chat(asked.chat_request)
            chat.take_defaults(state.config)
            chat.store, chat.n = False, 1 if asked.stream else len(given.choices)
            return chat, _chat_turn(state, chat, prompt)

    chat, turn = await beside(read_chat)
    answer = replace(Answer.of(state, chat), id=given.request_id)
    if asked.stream:
        start: dict[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": None}
        empty = answer.completion("chat.completion.chunk", [start])
        source = partial(stream_chat, chat=chat, turn=turn, answer=answer, owner=b"", direct=Direct())
        return await _next_chunk(state, asked, given, len(prompt), source, empty)
    chunks = await beside(lambda: _all_chunks(state, given, f"{name}.choices"))
    body = await complete_chat(Player(state, {_TURN: chunks}).state, turn, answer)
    if given.prompt_logprobs is not None:
        body["prompt_logprobs"] = given.prompt_logprobs
    return await large_response(lambda: body, heavy=is_heavy(body))


async def derender_completion(state: ServerState, request: Request) -> Response:
    asked = await read_as(request, state.config, partial(parse, DerenderCompletionRequest))
    check_model(state, asked.model)
    name = "generate_chunk" if asked.stream else "generate_responses"
    found = _given(getattr(asked, name), name)
    given: list[Generated] = [found] if asked.stream else found
    counts = _each(asked.prompt_tokens, len(given), asked.stream, "prompt_tokens")
    prompts = _each(asked.prompt_token_ids, len(given), asked.stream, "prompt_token_ids")
    ids = [each.prompt(prompts[place], counts[place]) for place, each in enumerate(given)]

    def read_completion() -> tuple[CompletionRequest, list[PromptTurn]]:
        with _within("completion_request"):
            completion = parse_completion(asked.completion_request)
            completion.take_defaults(state.config)
            if completion.echo and completion.logprobs is not None:
                raise unsupported("echo", "cannot be combined with logprobs")
            completion.n = 1 if asked.stream else completion.n
            return completion, [_raw_turn(state, completion, each, str(at)) for at, each in enumerate(ids)]

    def play(completion: CompletionRequest) -> dict[str, list[TokenChunk]]:
        chunks = {}
        for place, each in enumerate(given):
            path = f"{name}[{place}].choices"
            if len(each.choices) != completion.n:
                raise invalid(path, f"must be {completion.n} (n)")
            chunks[str(place)] = _all_chunks(state, each, path)
        return chunks

    completion, prepared = await beside(read_completion)
    answer = TextAnswer(
        state.model_names[0], completion, state.vocab, NO_METRICS, state.fingerprint, id=given[0].request_id
    )
    if asked.stream:
        empty = answer.object([{"text": "", "logprobs": None, "finish_reason": None}])
        source = partial(stream_text, prepared=prepared, answer=answer)
        return await _next_chunk(state, asked, given[0], len(ids[0]), source, empty)
    chunks = await beside(lambda: play(completion))
    body = await complete_text(Player(state, chunks).state, prepared, answer)
    if completion.prompt_logprobs is not None:
        for place, choice in enumerate(body["choices"]):
            choice["prompt_logprobs"] = given[place // completion.n].prompt_logprobs
    return await large_response(lambda: body, heavy=is_heavy(body))


def _all_chunks(state: ServerState, given: Generated, path: str) -> list[TokenChunk]:
    found = []
    for place, choice in enumerate(_given(given.choices, path)):
        if choice.index != place or not choice.token_ids:
            raise invalid(f"{path}[{place}]", "must have its position as index, and tokens")
        choice.finish_reason = choice.finish_reason or "stop"
        found += choice_chunks(choice, state.client.info, given.num_cached)
    return found


def _chat_turn(state: ServerState, chat: ChatRequest, prompt: list[int]) -> TurnRequest:
    """Returns the turn that ``chat`` asks for, with this prompt. Raises ``RequestError``."""
    tail = split_continued(chat)[1]
    return turn_request(
        chat,
        state.client.info,
        state.vocab,
        request_id=_TURN,
        prompt_token_ids=prompt,
        rules=read_client_rules(chat),
        max_tokens=chat.output_limit,
        n=max(1, chat.n),
        logprobs=chat.num_logprobs,
        parallel_tool_calls=chat.parallel_tool_calls,
        stream_interval=1,
        prefill_token_ids=() if tail is None else continue_prompt([], tail, state.vocab),
        progress=chat.return_token_ids,
    )


def _raw_turn(state: ServerState, completion: CompletionRequest, prompt: list[int], name: str) -> PromptTurn:
    turn = turn_request(
        completion,
        state.client.info,
        state.vocab,
        request_id=name,
        prompt_token_ids=prompt,
        rules=TurnRules(raw=True),
        max_tokens=None,
        n=completion.n,
        logprobs=completion.logprobs,
        stream_interval=1,
        progress=completion.return_token_ids,
    )
    return PromptTurn(CompletionPrompt(prompt, state.vocab.decode(prompt) if completion.echo else ""), turn)


async def _next_chunk(
    state: ServerState,
    asked: DerenderChatRequest | DerenderCompletionRequest,
    given: Generated,
    num_prompt_tokens: int,
    source: Callable[[ServerState], AsyncGenerator[bytes]],
    found: dict[str, Any],
) -> Response:
    """Returns the chunk, and the state for the next one. ``found``: a chunk without content."""
    if len(given.choices) > 1:
        raise invalid("generate_chunk.choices", "must have at most one choice")
    before = list(asked.stream_state.output_token_ids) if asked.stream_state is not None else []
    for chosen in given.choices:
        index, chosen.index = chosen.index, 0
        # Of earlier log-probabilities, only the places of their tokens matter.
        scores = [TokenLogprobs(each, 0.0, 1, [], []) for each in before] if chosen.logprobs else None
        old = chunks_of(state.client.info, 0, before, (None, None), scores) if before else []
        new = await beside(partial(choice_chunks, chosen, state.client.info))
        player = Player(state, {_TURN: [*old, *new], "0": [*old, *new]}, len(old))
        with suppress(Paused):
            async with aclosing(source(player.state)) as events:
                async for data in events:
                    for line in data.decode().split("\n") if player.is_new else ():
                        if line.startswith("data: {"):
                            part = json.loads(line[6:])
                            if part["choices"]:  # else it is the usage
                                _merge(found, part)
        found["choices"][0]["index"] = index
        before += chosen.token_ids
    if not given.choices:
        found["choices"] = []
    if given.usage is not None:
        usage = Usage(num_prompt_tokens, given.num_cached, given.usage.completion_tokens)
        found["usage"] = usage_object(usage)
    body = {"chunk": found, "stream_state": {"output_token_ids": before}}
    return await large_response(lambda: body, heavy=is_heavy(before))


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


@contextmanager
def _within(path: str) -> Iterator[None]:
    """Adds the path of an object to the parameters of errors in it."""
    try:
        yield
    except RequestError as error:
        error.param = path if error.param is None else f"{path}.{error.param}"
        raise


def _given(value: Any, param: str) -> Any:
    if not value:
        raise RequestError(f"{param}: is required", param=param, code="missing_required_parameter")
    return value


def _each(value: Any, count: int, streams: bool, param: str) -> Sequence[Any]:
    """Returns the values of all prompts. A chunk has one prompt and its value alone."""
    is_list = isinstance(value, list) and not (value and isinstance(value[0], int) and param.endswith("ids"))
    if value is not None and (is_list == streams or (is_list and len(value) != count)):
        raise invalid(param, "must be that of the prompt" if streams else f"must be a list of {count}")
    return [value] * count if streams or value is None else value
