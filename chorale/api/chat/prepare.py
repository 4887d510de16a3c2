"""From a ChatRequest to what run_turns takes: prompt ids, sampling, options."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chorale.api.chat.messages import content_text, reasoning_text, split_instructions, to_harmony
from chorale.api.chat.request import ChatRequest
from chorale.api.options import TurnOptions
from chorale.api.prompt import (
    check_distinct,
    developer_message,
    encode_conversation,
    reasoning_effort,
    system_message,
)
from chorale.api.rules import TurnRules, with_grammar
from chorale.api.sampling import resolve_sampling
from chorale.api.state import ServerState
from chorale.api.structured import Structured, combine, read_format, read_structured
from chorale.api.tool_choice import Function, read_tool_choice
from chorale.engine.types import SamplingSpec
from chorale.errors import RequestError
from chorale.harmony.messages import Conversation, Message
from chorale.harmony.vocab import CHANNEL, END, MESSAGE, START, Vocabulary

NEVER = 1 << 30  # tokens: a non-streaming turn is read once, at its end


@dataclass(frozen=True, slots=True)
class Prepared:
    prompt_token_ids: list[int]
    sampling: SamplingSpec
    options: TurnOptions


async def prepare(state: ServerState, chat: ChatRequest) -> Prepared:
    """Raises ``RequestError`` for what is wrong in messages or tools, or does not fit the window."""
    info = state.client.info
    rules, structured = read_rules(chat)
    messages, tail = _split_continued(chat)
    if tail is not None and rules.binds:
        raise RequestError(
            "continue_final_message: cannot be used together with structured output, a choice of tools or a "
            "reasoning budget",
            param="continue_final_message",
            code="unsupported_value",
        )
    prompt = await encode_conversation(conversation(state, chat, messages, rules, structured), state.vocab)
    header = _continue_prompt(prompt, tail, state.vocab) if tail is not None else ()
    sampling = resolve_sampling(
        chat,
        info,
        state.vocab,
        num_prompt_tokens=len(prompt),
        max_tokens=chat.output_limit,
        n=chat.n,
        logprobs=chat.num_logprobs,
        prompt_logprobs=chat.prompt_logprobs,
    )
    sampling = await with_grammar(state.grammars, rules, chat, sampling)
    options = TurnOptions(
        request_id=f"chat-{secrets.token_hex(12)}",
        function_names=rules.callable_names,
        stop=tuple(chat.stop or ()),
        include_stop=bool(chat.include_stop_str_in_output),
        parallel_tool_calls=chat.parallel_tool_calls,
        stream_interval=state.config.stream_interval if chat.stream else NEVER,
        prefill_token_ids=header,
        ensure_answer=not chat.ignore_eos,
        ignore_eos=bool(chat.ignore_eos),
        progress=chat.stream and (chat.continuous_usage or chat.return_token_ids),
        priority=chat.priority or 0,
        cache_salt=chat.cache_salt or "",
        arrival_time=time.time(),
    )
    return Prepared(prompt, sampling, options)


def conversation(
    state: ServerState,
    chat: ChatRequest,
    messages: list[dict[str, Any]],
    rules: TurnRules,
    structured: Structured,
) -> Conversation:
    """System, developer (instructions, tools, the answer's format), then the rest in order."""
    instructions, num_leading = split_instructions(messages)
    head: list[Message] = [system_message(state.config, reasoning_effort(*chat.effort), chat.identity)]
    tools = [function.tool for function in rules.functions]
    developer = developer_message(instructions, tools, structured.described)
    if developer is not None:
        head.append(developer)
    return Conversation((*head, *to_harmony(messages, num_leading)))


def read_rules(chat: ChatRequest) -> tuple[TurnRules, Structured]:
    """What the turn may look like. Raises ``RequestError`` for tools, choice or format."""
    structured = combine(
        read_format(chat.response_format, "response_format"), read_structured(chat), "response_format"
    )
    functions = [_function(tool, f"tools[{position}]") for position, tool in enumerate(chat.tools or [])]
    functions += [
        Function.read(f, f"functions[{position}]") for position, f in enumerate(chat.functions or [])
    ]
    check_distinct([function.tool for function in functions], "tools")
    param = "tool_choice" if chat.tool_choice is not None else "function_call"
    rules = TurnRules(
        functions=functions,
        choice=read_tool_choice(getattr(chat, param), functions, param),
        answer=structured.constraint,
        thinking_budget=chat.thinking_token_budget,
    )
    return rules, structured


def _function(tool: Mapping[str, Any], path: str) -> Function:
    if tool.get("type") != "function":
        raise RequestError(
            f"{path}.type: {str(tool.get('type'))[:64]!r} is not supported yet; 'function' is",
            param=f"{path}.type",
            code="unsupported_value",
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function: must be an object", param=f"{path}.function")
    return Function.read(function, f"{path}.function")


# --------------------------------------------------------------------------- continue_final_message


def _split_continued(chat: ChatRequest) -> tuple[list[dict[str, Any]], tuple[str | None, str | None] | None]:
    """(messages to render, (reasoning, content) of the assistant message that is continued)."""
    if not chat.continue_final_message:
        return chat.messages, None
    last, path = chat.messages[-1], f"messages[{len(chat.messages) - 1}]"
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise RequestError(
            f"continue_final_message: {path} must be an assistant message without tool calls",
            param="continue_final_message",
        )
    return chat.messages[:-1], (reasoning_text(last, path), content_text(last, path))


def _continue_prompt(
    prompt: list[int], tail: tuple[str | None, str | None], vocab: Vocabulary
) -> tuple[int, ...]:
    """Extend ``prompt`` (in place) by the open message; returns that message's header."""
    reasoning, content = tail
    if reasoning and content is not None:
        prompt += [
            *_header("analysis", vocab),
            *vocab.encode(reasoning),
            END,
            START,
            *vocab.encode("assistant"),
        ]
    text, channel = (reasoning, "analysis") if reasoning and content is None else (content or "", "final")
    header = _header(channel, vocab)
    prompt += [*header, *vocab.encode(text)]
    return header


def _header(channel: str, vocab: Vocabulary) -> tuple[int, ...]:
    return (CHANNEL, *vocab.encode(channel), MESSAGE)
