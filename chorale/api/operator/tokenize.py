"""/tokenize and /detokenize: converts a prompt or a chat to tokens, and tokens to text."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api import limits
from chorale.api.chat.prepare import built_in_tools, encode, prepare, read_rules
from chorale.api.chat.request import parse_chat
from chorale.api.fields import StrictModel, TokenId, parse
from chorale.api.http.offload import HEAVY, beside
from chorale.api.http.responses import json_response, large_response, read_as, read_json
from chorale.api.state import ServerState, check_model
from chorale.errors import invalid
from chorale.harmony.vocab import Vocabulary
from chorale.requests.prompt import at
from chorale.turns.built_in.open import close_tools

HEAVY_TOKENS = 8 * 1024  # longer lists are decoded in a thread: a million tokens take half a second


class Shown(StrictModel):
    """Response options common to both forms of the request."""

    return_token_strs: bool = False


class TokenizeRequest(Shown):
    """A raw prompt. ``add_special_tokens`` has no effect: gpt-oss adds none to a prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: Annotated[list[TokenId], limits.items("prompt_tokens")]


async def tokenize(state: ServerState, request: Request) -> Response:
    """Encodes {prompt} like /v1/completions (with special tokens), or {messages, tools} like a chat."""
    data = await read_json(request, state.config)
    if "messages" in data:
        given = {key: data.pop(key) for key in Shown.model_fields if key in data}
        shown = parse(Shown, given)
        return await _answer(state, await encode_chat(state, data), shown.return_token_strs)
    parsed = parse(TokenizeRequest, data)
    check_model(state, parsed.model)
    return await _answer(state, await encode_prompt(state.vocab, parsed.prompt), parsed.return_token_strs)


async def encode_chat(state: ServerState, data: dict[str, Any]) -> list[int]:
    """Returns the prompt ids of a chat, even if they are slightly longer than the context window."""
    # A chat request must add the generation prompt or continue its last message: validate without this field.
    closed = data.get("add_generation_prompt") is False and not data.get("continue_final_message")
    if closed:
        del data["add_generation_prompt"]
    chat = parse_chat(data)
    check_model(state, chat.model)
    asked = built_in_tools(chat)
    if chat.continue_final_message or asked.wanted or asked.unserved:
        turn = await prepare(state, chat, b"")  # nothing is submitted to the engine
        await close_tools(turn.tools)
        token_ids = turn.prompt_token_ids
    else:
        token_ids = await encode(state, chat, chat.messages, read_rules(chat))
    # The last two ids are <|start|>assistant, which asks for the answer.
    return token_ids[:-2] if closed else token_ids


async def encode_prompt(vocab: Vocabulary, text: str) -> list[int]:
    def work() -> list[int]:
        with at("prompt"):
            return vocab.encode_with_special(text, limits.SIZES["prompt_tokens"].max)

    return await beside(work, heavy=len(text) > HEAVY)


async def _answer(state: ServerState, token_ids: list[int], with_strings: bool) -> Response:
    def body() -> dict[str, Any]:
        return {
            "count": len(token_ids),
            "max_model_len": state.client.info.max_model_len,
            "tokens": token_ids,
            "token_strs": [state.vocab.decode([each]) for each in token_ids] if with_strings else None,
        }

    return await large_response(body, heavy=len(token_ids) > HEAVY_TOKENS)


async def detokenize(state: ServerState, request: Request) -> Response:
    return await read_as(request, state.config, partial(_decode, state))


def _decode(state: ServerState, data: dict[str, Any]) -> Response:
    parsed = parse(DetokenizeRequest, data)
    check_model(state, parsed.model)
    try:
        return json_response({"prompt": state.vocab.decode(parsed.tokens)})
    except ValueError as error:
        raise invalid("tokens", f"{error}") from None
