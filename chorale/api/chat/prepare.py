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
    function_tool,
    reasoning_effort,
    system_message,
)
from chorale.api.sampling import resolve_sampling
from chorale.api.state import ServerState
from chorale.engine.types import SamplingSpec
from chorale.errors import RequestError
from chorale.harmony.messages import Conversation, Message, ToolDescription
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
    tools = offered_tools(chat)
    messages, tail = _split_continued(chat)
    prompt = await encode_conversation(conversation(state, chat, messages, tools), state.vocab)
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
    options = TurnOptions(
        request_id=f"chat-{secrets.token_hex(12)}",
        function_names=frozenset(tool.name for tool in tools),
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
    tools: tuple[ToolDescription, ...],
) -> Conversation:
    """System, developer (instructions and tools), then the rest in order."""
    instructions, num_leading = split_instructions(messages)
    head: list[Message] = [system_message(state.config, reasoning_effort(*chat.effort), chat.identity)]
    developer = developer_message(instructions, tools)
    if developer is not None:
        head.append(developer)
    return Conversation((*head, *to_harmony(messages, num_leading)))


def offered_tools(chat: ChatRequest) -> tuple[ToolDescription, ...]:
    """The declared functions; none when the choice is "none", so that none can be called."""
    tools = [_tool(tool, f"tools[{position}]") for position, tool in enumerate(chat.tools or [])]
    tools += [function_tool(f, f"functions[{position}]") for position, f in enumerate(chat.functions or [])]
    check_distinct(tools, "tools")
    if "none" in (chat.tool_choice, chat.function_call):
        return ()
    return tuple(tools)


def _tool(tool: Mapping[str, Any], path: str) -> ToolDescription:
    if tool.get("type") != "function":
        raise RequestError(
            f"{path}.type: {str(tool.get('type'))[:64]!r} is not supported yet; 'function' is",
            param=f"{path}.type",
            code="unsupported_value",
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function: must be an object", param=f"{path}.function")
    return function_tool(function, f"{path}.function")


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
