"""The check of the token format against servers that render one thing wrong each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chorale.harmony.vocab import load_vocabulary
from chorale.selfcheck.serving import harmony
from tests.support.selfcheck_server import outcome

Message = dict[str, Any]
Ids = list[int]


def special(text: str) -> Ids:
    return load_vocabulary().encode_with_special(text)


def plain(text: str) -> Ids:
    return load_vocabulary().encode(text)


def rendered(message: Message, content: Callable[[str], Ids]) -> Ids:
    """The tokens of one message; ``content`` encodes what a user or a tool wrote."""
    if message["role"] == "assistant":
        function = message["tool_calls"][0]["function"]
        header = f"assistant to=functions.{function['name']}<|channel|>commentary json"
        return special(f"<|start|>{header}<|message|>{function['arguments']}<|call|>")
    name = "functions.look to=assistant" if message["role"] == "tool" else message["role"]
    return [*special(f"<|start|>{name}<|message|>"), *content(message["content"]), *special("<|end|>")]


def drop_tool_result(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message["role"] != "tool"]


def other_arguments(messages: list[Message]) -> list[Message]:
    call = {"function": {"name": "look", "arguments": '{"at": "sea"}'}}
    return [m | {"tool_calls": [call]} if m["role"] == "assistant" else m for m in messages]


@pytest.mark.parametrize(
    ("change", "content", "opening", "shown", "words"),
    [
        (list, plain, "<|start|>assistant", str, ""),
        (list, special, "<|start|>assistant", str, "users' messages"),
        (drop_tool_result, plain, "<|start|>assistant", str, "the tool's result"),
        (other_arguments, plain, "<|start|>assistant", str, "the tool call"),
        (list, plain, "<|start|>assistant<|channel|>", str, "does not end by opening"),
        (list, plain, "<|start|>assistant", str.strip, "/detokenize gives"),
    ],
    ids=["right", "special tokens in text", "no result", "another call", "another opening", "other text"],
)
def test_harmony(
    change: Any, content: Any, opening: str, shown: Any, words: str, process: Any, tmp_path: Path
) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        if path == "/detokenize":
            return {"prompt": shown(load_vocabulary().decode(body["tokens"]))}
        ids = [token for message in change(body["messages"]) for token in rendered(message, content)]
        choice = {"message": {"content": "x"}, "finish_reason": "length"}
        return {"prompt_token_ids": [*ids, *special(opening)], "choices": [choice]}

    found = outcome(harmony.check_harmony, answer, process, tmp_path)
    assert (found.verdict, words in found.detail) == ("failed" if words else "ok", True), found
