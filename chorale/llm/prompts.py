"""Converts the prompts of ``LLM.generate`` and ``LLM.chat`` to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chorale.client.base import EngineInfo
from chorale.config.engine import ServerConfig
from chorale.errors import ContextLengthError
from chorale.harmony.messages import ToolDescription
from chorale.harmony.render import render_conversation
from chorale.harmony.vocab import Vocabulary
from chorale.requests.effort import DEFAULT_EFFORT, reasoning_effort
from chorale.requests.messages import split_instructions, take_efforts, to_harmony
from chorale.requests.prompt import check_distinct, prompt_head, read_function
from chorale.turns.functions import Function

ChatMessages = Sequence[Mapping[str, Any]]
OnePrompt = str | Mapping[str, Any] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str | None  # None if token ids were given
    token_ids: list[int]
    cache_salt: str = ""


def read_prompts(
    prompts: OnePrompt | Sequence[OnePrompt] | None,
    prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    vocab: Vocabulary,
) -> list[Prompt]:
    """Read one or several prompts: text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or ids.

    A dictionary may also have a ``cache_salt``, but no other key. Special tokens in text are encoded as
    special tokens, as on ``/v1/completions``. Raises ``TypeError`` or ``ValueError``.
    """
    if (prompts is None) == (prompt_token_ids is None):
        raise ValueError("give either prompts or prompt_token_ids")
    given: Any = prompts if prompts is not None else prompt_token_ids
    if isinstance(given, str | Mapping) or (given and _is_ids(given)):
        given = [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"a prompt is text or a list of token ids, not {type(given).__name__}")
    return [_read_one(prompt, vocab) for prompt in given]


def _is_ids(value: object) -> bool:
    """Return whether ``value`` is a list of token ids. The set of types is checked rather than each id, for
    speed: a prompt may have a hundred thousand."""
    if not isinstance(value, Sequence):
        return False
    return all(issubclass(kind, int) and kind is not bool for kind in set(map(type, value)))


def _read_one(prompt: Any, vocab: Vocabulary) -> Prompt:
    if isinstance(prompt, Mapping):
        return _read_dictionary(prompt, vocab)
    if isinstance(prompt, str):
        return Prompt(prompt, vocab.encode_with_special(prompt))
    if _is_ids(prompt):
        return Prompt(None, list(prompt))
    raise TypeError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")


def _read_dictionary(prompt: Mapping[str, Any], vocab: Vocabulary) -> Prompt:
    given = {name: value for name, value in prompt.items() if value is not None}
    salt = given.pop("cache_salt", "")
    text = given.pop("prompt", None)
    content = given.pop("prompt_token_ids", text)  # as in vLLM, both may be given
    if given or content is None:
        raise ValueError(
            "a prompt dictionary must have 'prompt' or 'prompt_token_ids', and optionally 'cache_salt', "
            f"not {sorted(prompt)}"
        )
    if not isinstance(salt, str) or isinstance(content, Mapping):
        raise TypeError("a prompt must be a string or a list of token ids, and its cache_salt a string")
    return replace(_read_one(content, vocab), cache_salt=salt)


def check_prompt(prompt: Prompt, info: EngineInfo) -> None:
    """Raises ``ValueError`` for an empty prompt or bad ids, ``ContextLengthError`` for a long one."""
    ids = prompt.token_ids
    if not ids:
        raise ValueError("the prompt is empty")
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        raise ValueError(f"the prompt holds a token id outside 0..{info.vocab_size - 1}")
    if len(ids) >= info.max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens; prompt and output are limited to {info.max_model_len}"
        )


def read_conversations(messages: ChatMessages | Sequence[ChatMessages]) -> list[ChatMessages]:
    """Return a list of conversations from one conversation or a list. Raises ``TypeError`` or
    ``ValueError``."""
    given: Any = messages
    several = [given] if isinstance(given, Sequence) and given and isinstance(given[0], Mapping) else given
    if not _is_list(several) or not all(
        _is_list(some) and all(isinstance(message, Mapping) for message in some) for some in several
    ):
        raise TypeError("messages must be a list of dictionaries (one conversation), or a list of such lists")
    if not all(several):
        raise ValueError("a conversation needs at least one message")
    return list(several)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Function, ...]:
    """Read function tools in the format of the chat API. Raises ``RequestError`` or ``ValueError``."""
    read = []
    for position, tool in enumerate(tools or ()):
        path = f"tools[{position}]"
        described = isinstance(tool, Mapping) and tool.get("type") == "function"
        if not described or not isinstance(tool.get("function"), Mapping):
            raise ValueError(f"{path}: only {{'type': 'function', 'function': {{...}}}} is supported")
        read.append(read_function(tool["function"], f"{path}.function"))
    check_distinct([function.tool for function in read], "tools")
    return tuple(read)


def render_chat(
    messages: ChatMessages,
    tools: Sequence[ToolDescription],
    effort: str | None,
    vocab: Vocabulary,
    identity: str | None = None,
    *,
    for_completion: bool = True,
) -> Prompt:
    """Return the prompt, equal to the server's. ``identity``: first words of the system message.
    ``for_completion``: end it with the head of the answer.

    Raises ``RequestError`` with the path of the bad message.
    """
    cleaned, said = take_efforts(messages)
    instructions, num_leading = split_instructions(cleaned)
    chosen = reasoning_effort(effort, "reasoning_effort", said or DEFAULT_EFFORT)
    head = prompt_head(ServerConfig(), chosen, instructions, tools, identity=identity)
    rendered = [*head, *to_harmony(cleaned, num_leading)]
    return Prompt(None, render_conversation(rendered, vocab, for_completion=for_completion))
