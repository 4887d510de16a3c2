"""Converts a ChatRequest to a TurnRequest."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chorale.api.chat.request import ChatRequest
from chorale.api.fields import wants_continuous_usage
from chorale.api.http.auth import cache_salt
from chorale.api.http.offload import beside, is_heavy
from chorale.api.http.pdfs import read_pdfs
from chorale.api.limits import SIZES, check_scores
from chorale.api.routed_experts import check_experts
from chorale.api.state import ServerState
from chorale.errors import invalid, unsupported
from chorale.harmony.render import ASSISTANT, render_conversation
from chorale.harmony.vocab import END, START, Vocabulary
from chorale.requests.built_in_tools import read_built_in
from chorale.requests.client_tools import custom_tool
from chorale.requests.effort import reasoning_effort
from chorale.requests.formats import read_answer
from chorale.requests.messages import (
    content_text,
    reasoning_text,
    split_instructions,
    take_efforts,
    to_harmony,
)
from chorale.requests.prompt import at, check_distinct, open_message, prompt_head, read_function
from chorale.requests.readers import read_mapping, read_text
from chorale.requests.tool_choice import read_tool_choice
from chorale.tools.contract import BuiltInRequest, ToolBox
from chorale.turns.built_in.availability import check_available
from chorale.turns.built_in.open import TurnTools, close_tools, open_tools
from chorale.turns.functions import Function
from chorale.turns.request import TurnRequest, check_grammar, turn_request
from chorale.turns.rules import TurnRules


async def prepare(state: ServerState, chat: ChatRequest, owner: bytes) -> TurnRequest:
    """Prepares a turn. Raises ``RequestError`` for invalid messages or tools, or if the prompt is too long.

    ``owner``: the digest of the caller's key. Running the turn closes the opened tools.
    """
    rules = await beside(lambda: read_rules(chat), heavy=_is_heavy(chat))
    if not chat.continue_final_message:  # no grammar covers the rest of a message
        rules = replace(rules, strict_level=state.config.tool_strict_level)
    asked = check_available(state.tools, built_in_tools(chat), rules)
    rules, tools = await open_tools(state.tool_host, asked, rules, num_choices=chat.n)
    try:
        return await _prepare(state, chat, owner, rules, tools)
    except BaseException:
        await close_tools(tools)
        raise


async def _prepare(
    state: ServerState, chat: ChatRequest, owner: bytes, rules: TurnRules, tools: tuple[TurnTools, ...]
) -> TurnRequest:
    messages, tail = split_continued(chat)
    if tail is not None and rules.binds:
        what = "structured output, tool_choice or a reasoning budget"
        raise unsupported("continue_final_message", f"cannot be used together with {what}")
    prompt = await encode(state, chat, messages, rules, tools[0].box if tools else None)
    header: tuple[int, ...] = ()
    if tail is not None:
        header = await beside(lambda: continue_prompt(prompt, tail, state.vocab), heavy=is_heavy(*tail))
    turn = turn_of(state, chat, prompt, rules, header, cache_salt(owner, chat.cache_salt), tools)
    check_scores(len(prompt), chat.prompt_logprobs)
    check_experts([turn])
    return await check_grammar(state.grammars, turn)


def turn_of(
    state: ServerState,
    chat: ChatRequest,
    prompt: list[int],
    rules: TurnRules,
    header: tuple[int, ...] = (),
    salt: str = "",
    tools: tuple[TurnTools, ...] = (),
) -> TurnRequest:
    """Returns a turn for a prompt. Raises ``RequestError``. ``header``: of the message to continue."""
    return turn_request(
        chat,
        state.client.info,
        state.vocab,
        request_id=f"chat-{secrets.token_hex(12)}",
        prompt_token_ids=prompt,
        rules=rules,
        max_tokens=chat.output_limit,
        n=chat.n,
        logprobs=chat.num_logprobs,
        logprob_token_ids=chat.logprob_token_ids,
        prompt_logprobs=chat.prompt_logprobs,
        routed_experts_start=chat.routed_experts_start,
        parallel_tool_calls=chat.parallel_tool_calls,
        stream_interval=state.config.stream_interval if chat.stream else None,
        prefill_token_ids=header,
        progress=(chat.stream and wants_continuous_usage(chat.stream_options))
        or (chat.return_token_ids and (chat.stream or chat.logprobs)),
        cache_salt=salt,
        adapter=state.adapter,
        tools=tools,
    )


async def encode(
    state: ServerState,
    chat: ChatRequest,
    messages: list[dict[str, Any]],
    rules: TurnRules,
    box: ToolBox | None = None,
) -> list[int]:
    """Returns token ids that end with ``<|start|>assistant``.

    The system and developer messages (instructions, tools, output format) precede the rest. Raises
    ``RequestError`` for invalid messages.
    """

    def work() -> list[int]:
        cleaned, said = take_efforts(messages)
        instructions, num_leading = split_instructions(cleaned)
        default = said or state.config.default_reasoning_effort
        effort = reasoning_effort(*chat.effort, default, state.config.reasoning_effort_map)
        tools = [function.tool for function in rules.functions]
        head = prompt_head(
            state.config, effort, instructions, tools, rules.described, identity=chat.identity, box=box
        )
        talk = [*head, *to_harmony(cleaned, num_leading, rules.freeform)]
        with at("messages"):
            return render_conversation(talk, state.vocab, most=SIZES["prompt_tokens"].max)

    heavy = _is_heavy(chat)
    await read_pdfs(state.pdfs, messages, "messages", heavy=heavy)
    return await beside(work, heavy=heavy)


def _is_heavy(chat: ChatRequest) -> bool:
    """Returns whether converting and rendering the request would block the event loop."""
    return is_heavy(
        *(chat.messages, chat.tools, chat.functions, chat.response_format),
        *(chat.structured_outputs, chat.guided_json, chat.guided_choice),
    )


def read_rules(chat: ChatRequest) -> TurnRules:
    """Returns the constraints of the turn. Raises ``RequestError`` naming the invalid field."""
    structured = read_answer(chat.response_format, chat, "response_format")
    functions = [
        _function(tool, f"tools[{position}]")
        for position, tool in enumerate(chat.tools or [])
        if not _is_built_in(tool)
    ]
    functions += [
        read_function(f, f"functions[{position}]") for position, f in enumerate(chat.functions or [])
    ]
    check_distinct([function.tool for function in functions], "tools")
    param = "tool_choice" if chat.tool_choice is not None else "function_call"
    return TurnRules(
        functions=functions,
        choice=read_tool_choice(getattr(chat, param), functions, param, built_in_tools(chat).names),
        answer=structured.constraint,
        described=structured.described,
        thinking_budget=chat.thinking_token_budget,
    )


def read_client_rules(chat: ChatRequest) -> TurnRules:
    """Returns the same for a turn whose tools all run on the client. Raises ``RequestError`` for others."""
    rules = read_rules(chat)
    if built_in_tools(chat).names:
        raise unsupported("tools", "built-in tools run in Chat Completions and Responses only")
    return rules


def built_in_tools(chat: ChatRequest) -> BuiltInRequest:
    """Returns the requested built-in tools. Raises ``RequestError`` naming the field."""
    wanted = [
        (f"tools[{position}]", tool) for position, tool in enumerate(chat.tools or []) if _is_built_in(tool)
    ]
    if chat.web_search_options is not None:
        wanted.append(("web_search_options", {**chat.web_search_options, "type": "web_search"}))
    names = (chat.chat_template_kwargs or {}).get("builtin_tools") or []
    return read_built_in(wanted, names, approvals=False)


def _is_built_in(tool: Mapping[str, Any]) -> bool:
    """Returns whether a tool runs on the server. Functions and custom tools run on the client."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind not in ("function", "custom")


def _function(tool: Mapping[str, Any], path: str) -> Function:
    kind = read_text(tool, "type", path)
    declared, path = read_mapping(tool, kind, path), f"{path}.{kind}"
    return custom_tool(declared, path) if kind == "custom" else read_function(declared, path)


# --------------------------------------------------------------------------- continue_final_message


def split_continued(chat: ChatRequest) -> tuple[list[dict[str, Any]], tuple[str | None, str | None] | None]:
    """Returns the messages to render, and (reasoning, content) of the assistant message to continue."""
    if not chat.continue_final_message:
        return chat.messages, None
    last, path = chat.messages[-1], f"messages[{len(chat.messages) - 1}]"
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise invalid("continue_final_message", f"{path} must be an assistant message without tool calls")
    return chat.messages[:-1], (reasoning_text(last, path), content_text(last, path))


def continue_prompt(
    prompt: list[int], tail: tuple[str | None, str | None], vocab: Vocabulary
) -> tuple[int, ...]:
    """Appends the message to continue to ``prompt``, in place. Returns the message's header."""
    reasoning, content = tail
    most = SIZES["prompt_tokens"].max
    if reasoning and content is not None:
        prompt += [*open_message("analysis", reasoning, vocab, most)[1], END, START, ASSISTANT]
    text, channel = (reasoning, "analysis") if reasoning and content is None else (content or "", "final")
    header, opened = open_message(channel, text, vocab, most)
    prompt += opened
    return header
