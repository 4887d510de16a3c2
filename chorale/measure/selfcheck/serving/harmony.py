"""Checks of stop tokens, the token format and grammars, which pass with any correctly served weights."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from chorale.harmony.vocab import load_vocabulary
from chorale.measure.selfcheck.check import Failed, Found
from chorale.measure.selfcheck.serving.server import Server

KNOWN_TOKENS = Path(__file__).with_name("known_tokens.json")
_RETURN, _ENDOFTEXT, _CALL = 200002, 199999, 200012
_FORCED = 100.0  # a logit bias that exceeds any model's logits
_PATTERN = r"[A-F]{2}-[0-9]{3}(\.[a-z]{1,4})?"


class Look(msgspec.Struct, forbid_unknown_fields=True):
    """A place, and how often to look at it."""

    at: Literal["sky", "sea", "road"]
    times: Annotated[int, msgspec.Meta(ge=1, le=9)]


_LOOK: dict[str, Any] = msgspec.json.schema_components([Look])[1]["Look"]
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _LOOK}}


async def check_harmony(server: Server) -> Found:
    """Compares token ids of texts and a chat with openai-harmony's (``scripts/known_answers.py``)."""
    known = json.loads(KNOWN_TOKENS.read_text("ascii"))
    for text, ids in known["texts"]:
        body = await server.post("/detokenize", {"tokens": ids})
        if body["prompt"] != text:
            raise Failed(f"/detokenize gives {body['prompt'][:60]!r} for the tokens of {text[:60]!r}")
        # A raw prompt turns names of special tokens into special tokens, unlike the stored ids.
        if "<|" not in text:
            body = await server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
            _check_ids(f"{text[:60]!r}", body["tokens"], ids)
    choice = await server.choice(
        "chat/completions", messages=known["messages"], tools=[_TOOL], max_tokens=1, return_token_ids=True
    )
    _check_ids("the end of a chat", (choice["prompt_token_ids"] or [])[-len(known["chat"]) :], known["chat"])
    return Found(f"{len(known['texts'])} texts and a chat have their published tokens")


def _check_ids(what: str, found: list[int], expected: list[int]) -> None:
    for index, (one, other) in enumerate(zip_longest(found, expected)):
        if one != other:
            near = slice(index, index + 6)
            shown = " instead of ".join(
                f"{ids[near]} {load_vocabulary().decode(ids[near])!r}" for ids in (found, expected)
            )
            raise Failed(f"{what} has the tokens {shown} from index {index} on")


async def check_stops(server: Server) -> Found:
    """Checks that stop tokens end an answer without appearing in its text, and that stop strings cut it."""
    (word,) = load_vocabulary().encode("hello")
    hellos, cut = ("length", "hello" * 8, 8), ("stop", "hel", 2)
    cases: list[tuple[str, int, dict[str, Any], tuple[str, str, int]]] = [
        *((f"stop token {token}", token, {}, ("stop", "", 1)) for token in (_RETURN, _ENDOFTEXT, _CALL)),
        ("ignore_eos", _RETURN, {"ignore_eos": True}, ("length", "", 8)),
        ("max_tokens", word, {}, hellos),
        ("a stop string over two tokens", word, {"stop": ["lohe"]}, cut),
        ("stop_token_ids", word, {"stop_token_ids": [word]}, ("stop", "", 1)),
    ]
    asked = {"prompt": "The", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    for what, token, fields, expected in cases:
        choice = await server.choice("completions", logit_bias={str(token): _FORCED}, **asked, **fields)
        found = choice["finish_reason"], choice["text"], len(choice["token_ids"])
        if found != expected:
            raise Failed(f"{what}: finish reason, text and count are {found}, not {expected}")
    return Found(", ".join(what for what, *_ in cases))


async def check_grammar(server: Server) -> Found:
    """Checks that concurrent answers under a JSON Schema or regular expression match it, at temperature 1."""
    schema = {"type": "json_schema", "json_schema": {"name": "look", "strict": True, "schema": _LOOK}}
    question = [{"role": "user", "content": "Look at something."}]

    async def one(seed: int) -> None:
        sampling = {"seed": seed, "temperature": 1.0, "max_tokens": 256}
        answer = await server.choice(
            "chat/completions", messages=question, response_format=schema, thinking_token_budget=0, **sampling
        )
        _check_look(answer["message"]["content"] or "", "answers of a chat")
        raw = await server.choice(
            "completions", prompt="Look:", structured_outputs={"json": _LOOK}, **sampling
        )
        _check_look(raw["text"], "completions")
        raw = await server.choice(
            "completions", prompt="Code:", structured_outputs={"regex": _PATTERN}, **sampling
        )
        if not re.fullmatch(_PATTERN, raw["text"]):
            raise Failed(f"an answer under a regular expression does not match it: {raw['text'][:80]!r}")

    async with asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(one(seed))
    return Found("12 answers at temperature 1 under a JSON Schema or a regular expression match it")


def _check_look(text: str, what: str) -> None:
    try:
        msgspec.json.decode(text, type=Look)
    except msgspec.MsgspecError:
        raise Failed(f"{what} do not match their JSON Schema: {text[:120]!r}") from None
