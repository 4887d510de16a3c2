"""Converts a MessagesRequest to a TurnRequest."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from chorale.api.http.auth import cache_salt
from chorale.api.http.offload import beside, is_heavy
from chorale.api.limits import SIZES
from chorale.api.messages.convert import Converter, system_text
from chorale.api.messages.request import CountRequest, MessagesRequest
from chorale.api.messages.tools import read_tools
from chorale.api.record import recorded
from chorale.api.state import ServerState
from chorale.config.engine import DisabledEffort, StrictLevel
from chorale.errors import invalid, unsupported
from chorale.harmony.messages import Message
from chorale.harmony.render import render_conversation
from chorale.requests.effort import reasoning_effort, take_effort
from chorale.requests.formats import read_format
from chorale.requests.prompt import at, open_message, prompt_head
from chorale.turns.request import TurnRequest, check_grammar, turn_request
from chorale.turns.rules import TurnRules

# Thinking budgets in tokens: below the first the effort is low, from the second it is high.
_LOW_BUDGET, _HIGH_BUDGET = 2048, 16384


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    prefill: tuple[int, ...]  # header of the message that the model continues, or ()
    rules: TurnRules


async def prepare(state: ServerState, request: MessagesRequest, owner: bytes) -> TurnRequest:
    """Prepares a turn. Raises ``RequestError`` for an invalid request, or if the prompt is too long.

    ``owner``: the digest of the caller's key.
    """
    prompt = await build_prompt(state, request)
    choice = request.tool_choice
    turn = turn_request(
        request,
        state.client.info,
        state.vocab,
        request_id=f"msg-{secrets.token_hex(12)}",
        prompt_token_ids=prompt.token_ids,
        rules=prompt.rules,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        stream_interval=state.config.stream_interval if request.stream else None,
        prefill_token_ids=prompt.prefill,
        progress=request.stream,  # message_start shows the usage so far
        cache_salt=cache_salt(owner, request.cache_salt),
        adapter=state.adapter,
    )
    return recorded(await check_grammar(state.grammars, turn), request.include_record)


async def build_prompt(state: ServerState, request: CountRequest) -> Prompt:
    """Builds the prompt of a request. Raises ``RequestError``."""
    config = request.output_config
    given = (request.messages, request.system, request.tools, config.format if config is not None else None)
    return await beside(lambda: _build_prompt(state, request), heavy=is_heavy(*given))


def _build_prompt(state: ServerState, request: CountRequest) -> Prompt:
    rules = read_rules(request, state.config.tool_strict_level)
    messages = Converter(state.vocab).convert(request.messages)
    tail = _continued(messages)
    if tail is not None:
        messages, rules = messages[:-1], _without_grammar(rules)
    instructions, said = take_effort(system_text(request.system) or "")
    default = said or state.config.default_reasoning_effort
    asked = _effort(request, state.config.disabled_thinking_effort)
    effort = reasoning_effort(asked, "output_config.effort", default, state.config.reasoning_effort_map)
    tools = [function.tool for function in rules.functions]
    head = prompt_head(state.config, effort, instructions, tools, rules.described)
    most = SIZES["prompt_tokens"].max
    with at("messages"):
        prompt = render_conversation([*head, *messages], state.vocab, most=most)
    header: tuple[int, ...] = ()
    if tail is not None:
        assert tail.channel is not None
        assert isinstance(tail.content, str)
        header, opened = open_message(tail.channel, tail.content, state.vocab, most)
        prompt += tail.token_ids or opened  # omitted thinking has only token ids, no text
    return Prompt(prompt, header, rules)


def read_rules(request: CountRequest, level: StrictLevel) -> TurnRules:
    """Returns the constraints of the turn. ``level``: --tool-strict-level. Raises ``RequestError``."""
    functions, choice = read_tools(request.tools or [], request.tool_choice, level)
    given = request.output_config.format if request.output_config is not None else None
    structured = read_format(given, "output_config.format")
    return TurnRules(
        functions=functions,
        choice=choice,
        answer=structured.constraint,
        described=structured.described,
        thinking_budget=request.budget,
        strict_level=level,
    )


def _effort(request: CountRequest, disabled: DisabledEffort) -> str | None:
    """Returns the requested effort, or the one that follows from ``thinking``."""
    config, thinking = request.output_config, request.thinking
    if config is not None and config.effort is not None:
        return config.effort
    if thinking is not None and thinking.type == "disabled":
        return "low" if disabled == "auto" else disabled
    if request.budget is None:
        return None
    if request.budget < _LOW_BUDGET:
        return "low"
    return "high" if request.budget >= _HIGH_BUDGET else "medium"


def _continued(messages: list[Message]) -> Message | None:
    """Returns the assistant message at the end of the request, which the model continues, or None.

    There may be no message at all: blocks that cannot be read (encrypted by another server) produce none.
    """
    if not messages or messages[-1].role != "assistant":
        return None
    last = messages[-1]
    if last.recipient is not None:
        raise invalid("messages", "a tool_use at the end requires its tool_result")
    return last


def _without_grammar(rules: TurnRules) -> TurnRules:
    """Drops the grammar that only ensures valid calls: a grammar covers a whole turn, not a continued one."""
    kept = [replace(function, text=None) for function in rules.functions]
    rules = replace(rules, functions=kept, strict_level="auto")
    if rules.binds:
        raise unsupported(
            "messages", "an answer cannot be continued together with thinking, a format or tool_choice"
        )
    return rules
