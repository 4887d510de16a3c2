"""Stop tokens, the token format there and back, tool calls and grammars. They work with any weights."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from chorale.harmony.messages import ContentDelta, MessageStart
from chorale.harmony.parser import Parser
from chorale.harmony.vocab import Vocabulary, load_vocabulary
from chorale.selfcheck.check import Failed, Found
from chorale.selfcheck.serving.context import Context
from chorale.selfcheck.serving.server import Server
from chorale.selfcheck.serving.texts import AWKWARD

_RETURN, _ENDOFTEXT, _CALL = 200002, 199999, 200012
_FORCED = 100.0  # a logit bias that wins against any model
_AT_ONCE = 4


async def check_stops(server: Server, context: Context) -> Found:
    """Every stop token ends an answer and is not in its text; stop strings cut it."""
    vocab = load_vocabulary()
    for token in (_RETURN, _ENDOFTEXT, _CALL):
        choice = await _forced(server, token)
        if choice["finish_reason"] != "stop" or choice["text"]:
            raise Failed(f"token {token} does not end an answer: {_shown(choice)}")
    choice = await _forced(server, _RETURN, ignore_eos=True)
    if choice["finish_reason"] != "length" or len(choice["token_ids"]) != 8:
        raise Failed(f"ignore_eos does not go on after a stop token: {_shown(choice)}")
    word = vocab.encode("hello")[0]
    choice = await _forced(server, word)
    if choice["finish_reason"] != "length" or choice["text"] != "hello" * 8:
        raise Failed(f"max_tokens or logit_bias has no effect: {_shown(choice)}")
    choice = await _forced(server, word, stop=["lohe"])
    if choice["finish_reason"] != "stop" or choice["text"] != "hel":
        raise Failed(f"a stop string over two tokens does not cut the text: {_shown(choice)}")
    choice = await _forced(server, word, stop_token_ids=[word])
    if choice["finish_reason"] != "stop" or len(choice["token_ids"]) != 1:
        raise Failed(f"stop_token_ids have no effect: {_shown(choice)}")
    return Found("3 stop tokens, ignore_eos, max_tokens, a stop string over two tokens, stop_token_ids")


async def _forced(server: Server, token: int, **fields: Any) -> dict[str, Any]:
    return await server.complete(
        prompt="The",
        max_tokens=8,
        temperature=0,
        logit_bias={str(token): _FORCED},
        return_token_ids=True,
        **fields,
    )


def _shown(choice: dict[str, Any]) -> str:
    return f"finish_reason {choice['finish_reason']}, text {choice.get('text', '')[:60]!r}"


async def check_harmony(server: Server, context: Context) -> Found:
    """The server's encoder gives the published token ids, and its rendering of a chat parses to the same."""
    vocab = load_vocabulary()
    for text in AWKWARD:
        body = await server.post("/detokenize", {"tokens": vocab.encode(text)})
        if body["prompt"] != text:
            raise Failed(f"/detokenize gives {body['prompt'][:60]!r} for the tokens of {text[:60]!r}")
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages = [
        {"role": "system", "content": "Follow the instructions."},
        *({"role": "user", "content": text} for text in AWKWARD),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": AWKWARD[2]},
        {"role": "user", "content": "And now?"},
    ]
    choice = await server.chat(messages=messages, tools=[_LOOK], max_tokens=1, return_token_ids=True)
    ids = choice["prompt_token_ids"] or []
    if ids[-2:] != vocab.encode_with_special("<|start|>assistant"):
        raise Failed("the prompt of a chat does not end by opening the assistant's message")
    found = _messages(ids[:-2], vocab)
    users = [content for header, content in found if header == "user"]
    if users != [*AWKWARD, "And now?"]:
        raise Failed(f"the users' messages in the prompt are not what was sent: {users}")
    if not any(header.startswith("functions.look") and AWKWARD[2] in content for header, content in found):
        raise Failed("the tool's result in the prompt is not what was sent")
    calls = [vocab.encode_with_special(f"{header}<|message|>{content}") for header, content in found
             if header.startswith("assistant")]  # fmt: skip
    events = Parser(vocab, tool_names=["functions.look"]).feed_all(calls[0][1:] if calls else [])
    recipients = [event.recipient for event in events if isinstance(event, MessageStart)]
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    if recipients != ["functions.look"] or content != '{"at": "sky"}':
        raise Failed(f"the tool call in the prompt parses to {recipients} {content!r}")
    return Found(f"{len(ids)} tokens of a chat with {len(messages)} messages read as what was sent")


def _messages(ids: list[int], vocab: Vocabulary) -> list[tuple[str, str]]:
    """(header, content) of the messages of a prompt, split at the special tokens alone."""
    start, message, end, call = (
        vocab.encode_with_special(name)[0] for name in ("<|start|>", "<|message|>", "<|end|>", "<|call|>")
    )
    found = []
    places = [place for place, token in enumerate(ids) if token == start]
    for begin, after in zip(places, [*places[1:], len(ids)], strict=True):
        piece = [token for token in ids[begin + 1 : after] if token not in (end, call)]
        middle = piece.index(message) if message in piece else len(piece)
        found.append((vocab.decode(piece[:middle]), vocab.decode(piece[middle + 1 :])))
    return found


_LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at something.",
        "parameters": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "enum": ["sky", "sea", "road"]},
                "times": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["at", "times"],
            "additionalProperties": False,
        },
    },
}


async def check_tools(server: Server, context: Context) -> Found:
    """A required call is made, has arguments that fit its schema, and its result is taken."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look at the sky, three times."}]
    fields = {"tools": [_LOOK], "thinking_token_budget": 16, "max_tokens": 512, "temperature": 0}
    choice = await server.chat(messages=messages, tool_choice="required", **fields)
    calls = choice["message"].get("tool_calls") or []
    if choice["finish_reason"] != "tool_calls" or not calls:
        raise Failed(f"tool_choice required gave no call: finish_reason {choice['finish_reason']}")
    function = calls[0]["function"]
    arguments = _json(function["arguments"], "the arguments of a call")
    if function["name"] != "look" or not _fits_look(arguments):
        raise Failed(f"a call does not fit its schema: {function['name']}({function['arguments'][:120]})")
    messages += [
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": '{"seen": "clouds"}'},
    ]
    answer = await server.chat(messages=messages, tool_choice="none", **(fields | {"max_tokens": 64}))
    if answer["message"].get("tool_calls"):
        raise Failed("tool_choice none gave a call")
    asked = ""
    if context.is_trained and not context.is_small:
        free = await server.chat(messages=messages[:1], tools=[_LOOK], max_tokens=1024, temperature=0)
        if not free["message"].get("tool_calls"):
            raise Failed("asked to use its tool, the model made no call by itself")
        asked = "; a call by the model's own choice"
    return Found(f"look({json.dumps(arguments)}), its result taken, none where none is allowed{asked}")


def _fits_look(arguments: Any) -> bool:
    is_object = isinstance(arguments, dict) and set(arguments) == {"at", "times"}
    return is_object and arguments["at"] in ("sky", "sea", "road") and arguments["times"] in range(1, 10)


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise Failed(f"{what} are not JSON: {text[:120]!r}") from None


_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "married"],
    "additionalProperties": False,
}
_PATTERN = r"[A-F]{2}-[0-9]{3}(\.[a-z]{1,4})?"


async def check_grammar(server: Server, context: Context) -> Found:
    """Answers under a JSON Schema and a regular expression match them, at temperature 1, several at once."""
    chat_format = {
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": True, "schema": _PERSON},
    }

    async def one(seed: int) -> None:
        sampling = {"seed": seed, "temperature": 1.0, "max_tokens": 256}
        question = [{"role": "user", "content": "Describe a person."}]
        answer = await server.chat(
            messages=question, response_format=chat_format, thinking_token_budget=0, **sampling
        )
        _check_person(answer["message"]["content"] or "", answer["finish_reason"])
        raw = await server.complete(prompt="Person:", structured_outputs={"json": _PERSON}, **sampling)
        _check_person(raw["text"], raw["finish_reason"])
        raw = await server.complete(prompt="Code:", structured_outputs={"regex": _PATTERN}, **sampling)
        if not re.fullmatch(_PATTERN, raw["text"]):
            raise Failed(f"an answer under a regular expression does not match it: {raw['text'][:80]!r}")

    async with asyncio.TaskGroup() as group:
        for seed in range(_AT_ONCE):
            group.create_task(one(seed))
    return Found(
        f"{3 * _AT_ONCE} answers at temperature 1 under a JSON Schema or a regular expression match it"
    )


def _check_person(text: str, finish_reason: str) -> None:
    person = _json(text, "answers under a JSON Schema")
    fits = (
        isinstance(person, dict)
        and set(person) == set(_PERSON["properties"])
        and isinstance(person["name"], str)
        and re.fullmatch("[A-Z][a-z]{2,8}", person["name"]) is not None
        and person["age"] in range(121)
        and isinstance(person["tags"], list)
        and 1 <= len(person["tags"]) <= 3
        and set(person["tags"]) <= {"a", "b", "c"}
        and isinstance(person["married"], bool)
    )
    if not fits or finish_reason != "stop":
        raise Failed(f"an answer does not match its JSON Schema ({finish_reason}): {text[:120]!r}")
