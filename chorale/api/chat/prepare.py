"""From a ChatRequest to what run_turns takes: prompt ids, sampling, options."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chorale.api.chat.request import ChatRequest
from chorale.api.http.cache_salt import cache_salt
from chorale.api.http.offload import beside, is_heavy
from chorale.api.limits import SIZES
from chorale.api.state import ServerState
from chorale.engine.types import SamplingSpec
from chorale.errors import RequestError
from chorale.harmony.messages import Conversation
from chorale.harmony.render import render_conversation
from chorale.harmony.vocab import CHANNEL, END, MESSAGE, START, Vocabulary
from chorale.tools.contract import ToolBox
from chorale.turns.options import TurnOptions
from chorale.turns.prompt.effort import reasoning_effort
from chorale.turns.prompt.encode import at, check_distinct, developer_message, system_message
from chorale.turns.prompt.openai_messages import (
    content_text,
    reasoning_text,
    split_instructions,
    take_efforts,
    to_harmony,
)
from chorale.turns.rules import TurnRules, with_grammar
from chorale.turns.sampling import resolve_sampling
from chorale.turns.structured import Structured, combine, read_format, read_structured
from chorale.turns.tools.built_in import HostedTools, builtin_tools, read_hosted
from chorale.turns.tools.client_tools import custom_tool
from chorale.turns.tools.loop import TurnTools
from chorale.turns.tools.open_tools import Plan, check_available, close_tools, open_tools
from chorale.turns.tools.tool_choice import Function, read_tool_choice

NEVER = 1 << 30  # tokens: a non-streaming turn is read once, at its end


@dataclass(frozen=True, slots=True)
class Prepared:
    prompt_token_ids: list[int]
    sampling: SamplingSpec
    options: TurnOptions


async def prepare(state: ServerState, chat: ChatRequest, owner: bytes) -> Prepared:
    """Raises ``RequestError`` for what is wrong in messages or tools, or does not fit the window.

    ``owner``: the digest of the caller's key. The turn closes the boxes of ``options.tools``.
    """
    rules, structured = await beside(lambda: read_rules(chat), heavy=_is_heavy(chat))
    wants_search = rules.choice.hosted is not None and "web_search" in rules.choice.hosted
    hosted = check_available(
        state, hosted_tools(chat), own_tools=bool(rules.functions), wants_search=wants_search
    )
    rules, tools = await open_tools(state, Plan(hosted), rules, chat.n)
    try:
        return await _prepare(state, chat, owner, rules, structured, tools)
    except BaseException:
        await close_tools(tools)
        raise


async def _prepare(
    state: ServerState,
    chat: ChatRequest,
    owner: bytes,
    rules: TurnRules,
    structured: Structured,
    tools: tuple[TurnTools, ...],
) -> Prepared:
    info = state.client.info
    messages, tail = _split_continued(chat)
    if tail is not None and rules.binds:
        raise RequestError(
            "continue_final_message: cannot be used together with structured output, a choice of tools or a "
            "reasoning budget",
            param="continue_final_message",
            code="unsupported_value",
        )
    box = tools[0].box if tools else None
    prompt = await encode(state, chat, messages, rules, structured, box)
    header: tuple[int, ...] = ()
    if tail is not None:
        header = await beside(lambda: _continue_prompt(prompt, tail, state.vocab), heavy=is_heavy(*tail))
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
        call_forms=rules.call_forms,
        stop=tuple(chat.stop or ()),
        min_tokens=sampling.min_tokens,
        include_stop=bool(chat.include_stop_str_in_output),
        parallel_tool_calls=chat.parallel_tool_calls,
        stream_interval=state.config.stream_interval if chat.stream else NEVER,
        prefill_token_ids=header,
        ensure_answer=not chat.ignore_eos,
        ignore_eos=bool(chat.ignore_eos),
        progress=chat.stream and (chat.continuous_usage or chat.return_token_ids),
        priority=chat.priority or 0,
        cache_salt=cache_salt(owner, chat.cache_salt),
        arrival_time=time.time(),
        tools=tools,
    )
    return Prepared(prompt, sampling, options)


async def encode(
    state: ServerState,
    chat: ChatRequest,
    messages: list[dict[str, Any]],
    rules: TurnRules,
    structured: Structured,
    box: ToolBox | None = None,
) -> list[int]:
    """Token ids, ending in ``<|start|>assistant``. Raises ``RequestError`` for what is wrong in messages."""

    def work() -> list[int]:
        talk = conversation(state, chat, messages, rules, structured, box)
        with at("messages"):
            return render_conversation(talk, state.vocab, most=SIZES["prompt_tokens"].max)

    return await beside(work, heavy=_is_heavy(chat))


def _is_heavy(chat: ChatRequest) -> bool:
    """Whether reading and rendering the request would hold up the event loop."""
    return is_heavy(
        *(chat.messages, chat.tools, chat.functions, chat.response_format),
        *(chat.structured_outputs, chat.guided_json, chat.guided_choice),
    )


def conversation(
    state: ServerState,
    chat: ChatRequest,
    messages: list[dict[str, Any]],
    rules: TurnRules,
    structured: Structured,
    box: ToolBox | None = None,
) -> Conversation:
    """System, developer (instructions, tools, the answer's format), then the rest in order."""
    cleaned, said = take_efforts(messages)
    instructions, num_leading = split_instructions(cleaned)
    effort = reasoning_effort(*chat.effort, said or state.config.default_reasoning_effort)
    head = [system_message(state.config, effort, chat.identity, box)]
    tools = [function.tool for function in rules.functions]
    freeform = {function.name for function in rules.functions if function.text is not None}
    developer = developer_message(instructions, tools, structured.described, box=box)
    if developer is not None:
        head.append(developer)
    return Conversation((*head, *to_harmony(cleaned, num_leading, freeform)))


def read_rules(chat: ChatRequest) -> tuple[TurnRules, Structured]:
    """What the turn may look like. Raises ``RequestError`` for tools, choice or format."""
    structured = combine(
        read_format(chat.response_format, "response_format"), read_structured(chat), "response_format"
    )
    functions = [
        _function(tool, f"tools[{position}]")
        for position, tool in enumerate(chat.tools or [])
        if not _is_hosted(tool)
    ]
    functions += [
        Function.read(f, f"functions[{position}]") for position, f in enumerate(chat.functions or [])
    ]
    check_distinct([function.tool for function in functions], "tools")
    param = "tool_choice" if chat.tool_choice is not None else "function_call"
    rules = TurnRules(
        functions=functions,
        choice=read_tool_choice(getattr(chat, param), functions, param, hosted_tools(chat).names),
        answer=structured.constraint,
        thinking_budget=chat.thinking_token_budget,
    )
    return rules, structured


def hosted_tools(chat: ChatRequest) -> HostedTools:
    """What the server is to run. Raises ``RequestError`` naming the field."""
    wanted = [
        (f"tools[{position}]", tool) for position, tool in enumerate(chat.tools or []) if _is_hosted(tool)
    ]
    if chat.web_search_options is not None:
        wanted.append(("web_search_options", {**chat.web_search_options, "type": "web_search"}))
    names = (chat.chat_template_kwargs or {}).get("builtin_tools") or []
    wanted += builtin_tools(names, "chat_template_kwargs.builtin_tools")
    return read_hosted(wanted, approvals=False)


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    """Whether the server would have to run it. Chat has two kinds of tools that clients run."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind not in ("function", "custom")


def _function(tool: Mapping[str, Any], path: str) -> Function:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise RequestError(f"{path}.type: must be a string", param=f"{path}.type")
    declared, path = tool.get(kind), f"{path}.{kind}"
    if not isinstance(declared, Mapping):
        raise RequestError(f"{path}: must be an object", param=path)
    return custom_tool(declared, path) if kind == "custom" else Function.read(declared, path)


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
            *_encode_open(reasoning, vocab),
            END,
            START,
            *vocab.encode("assistant"),
        ]
    text, channel = (reasoning, "analysis") if reasoning and content is None else (content or "", "final")
    header = _header(channel, vocab)
    prompt += [*header, *_encode_open(text, vocab)]
    return header


def _encode_open(text: str, vocab: Vocabulary) -> list[int]:
    with at("messages"):
        return vocab.encode(text, SIZES["prompt_tokens"].max)


def _header(channel: str, vocab: Vocabulary) -> tuple[int, ...]:
    return (CHANNEL, *vocab.encode(channel), MESSAGE)
