"""/tokenizer_info: the fields that lm-eval's RemoteTokenizer reads, and the output of the chat template."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from tests.support.raw_http import call
from tests.support.server import Server, served


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def user(text: str) -> dict[str, str]:
    return said("user", text)


CHATS: list[list[dict[str, str]]] = [
    [user("hi")],
    [said("system", "Be brief."), user("hi")],
    [said("system", "a"), said("developer", "b"), user("x"), said("assistant", "y\n"), user("z <|start|>")],
    [user("x"), said("assistant", "y"), user("é 你 {{ 7 * 7 }}"), said("system", "later"), user("w")],
    [said("developer", "only")],
    [said("system", "a"), said("system", "b")],
    [user("x"), said("system", "m"), said("developer", "n"), user("y")],
]


def render(template: str, **values: Any) -> str:
    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as in transformers and lm-eval
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template).render(**values)


async def info_of(server: Server) -> dict[str, Any]:
    answer = await call(server.port, "GET", "/tokenizer_info")
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


async def test_the_endpoint_exists_only_if_enabled() -> None:
    async with served(listens=True) as server:
        assert (await call(server.port, "GET", "/tokenizer_info")).status == 404
    async with served(tokenizer_info=True, listens=True) as server:
        info = await info_of(server)
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["model_max_length"] == 131072
    assert info["added_tokens_decoder"]["200002"]["content"] == info["eos_token"] == "<|return|>"


async def test_the_calls_of_lm_eval_work() -> None:
    """Encodes and decodes the special tokens with the calls of RemoteTokenizer."""
    async with served(tokenizer_info=True, listens=True) as server:
        info = await info_of(server)
        for name, token_id in (("bos_token", 199998), ("eos_token", 200002), ("pad_token", 199999)):
            body = {"prompt": info[name], "add_special_tokens": False}
            encoded = await call(server.port, "POST", "/tokenize", body)
            assert encoded.json["tokens"] == [token_id]
            decoded = await call(server.port, "POST", "/detokenize", {"tokens": [token_id]})
            assert decoded.json["prompt"] == info[name]


@pytest.mark.parametrize("opens", [True, False])
async def test_the_template_renders_what_the_server_renders(opens: bool) -> None:
    async with served(tokenizer_info=True, default_reasoning_effort="high", listens=True) as server:
        template = (await info_of(server))["chat_template"]
        for messages in CHATS:
            body = {"messages": messages, "add_generation_prompt": opens}
            answer = await call(server.port, "POST", "/tokenize", body)
            expected = server.state.vocab.decode(answer.json["tokens"])
            assert render(template, messages=messages, add_generation_prompt=opens) == expected
        with pytest.raises(ValueError, match="only text messages"):
            render(template, messages=[said("tool", "x")])
