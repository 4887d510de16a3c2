"""From a MessagesRequest to what a turn takes: prompt ids, sampling, options."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

from chorale.api.http.cache_salt import cache_salt
from chorale.api.http.offload import beside, is_heavy
from chorale.api.limits import SIZES
from chorale.api.messages.convert import Converter, system_text
from chorale.api.messages.request import CountRequest, MessagesRequest
from chorale.api.messages.tools import read_tools
from chorale.api.state import ServerState
from chorale.engine.types import SamplingSpec
from chorale.errors import RequestError
from chorale.harmony.messages import Conversation, Message
from chorale.harmony.render import render_conversation
from chorale.harmony.vocab import CHANNEL, MESSAGE
from chorale.turns.options import TurnOptions
from chorale.turns.prompt.effort import reasoning_effort, take_effort
from chorale.turns.prompt.encode import at, developer_message, system_message
from chorale.turns.rules import TurnRules, with_grammar
from chorale.turns.sampling import resolve_sampling
from chorale.turns.structured import Structured, read_format

NEVER = 1 << 30  # tokens: a turn that is not streamed is read once, at its end
# Answers are short of thought when little of it is allowed; from Anthropic's budgets to the model's efforts.
_LOW_BUDGET, _HIGH_BUDGET = 2048, 16384


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    prefill: tuple[int, ...]  # the header of a message that the model goes on writing
    rules: TurnRules


@dataclass(frozen=True, slots=True)
class Prepared:
    prompt_token_ids: list[int]
    sampling: SamplingSpec
    options: TurnOptions


async def prepare(state: ServerState, request: MessagesRequest, owner: bytes) -> Prepared:
    """Raises ``RequestError`` for what is wrong, or does not fit the window.

    ``owner``: the digest of the caller's key.
    """
    prompt = await build_prompt(state, request)
    sampling = resolve_sampling(
        request,
        state.client.info,
        state.vocab,
        num_prompt_tokens=len(prompt.token_ids),
        max_tokens=request.max_tokens,
    )
    sampling = await with_grammar(state.grammars, prompt.rules, request, sampling)
    choice = request.tool_choice
    options = TurnOptions(
        request_id=f"msg-{secrets.token_hex(12)}",
        function_names=prompt.rules.callable_names,
        stop=tuple(request.stop_sequences or ()),
        min_tokens=sampling.min_tokens,
        include_stop=bool(request.include_stop_str_in_output),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        stream_interval=state.config.stream_interval if request.stream else NEVER,
        prefill_token_ids=prompt.prefill,
        ensure_answer=not request.ignore_eos,
        ignore_eos=bool(request.ignore_eos),
        progress=request.stream,  # message_start tells the usage so far
        priority=request.priority or 0,
        cache_salt=cache_salt(owner, request.cache_salt),
        arrival_time=time.time(),
    )
    return Prepared(prompt.token_ids, sampling, options)


async def build_prompt(state: ServerState, request: CountRequest) -> Prompt:
    """The prompt that a request makes. Raises ``RequestError``."""
    config = request.output_config
    given = (request.messages, request.system, request.tools, config.format if config is not None else None)
    return await beside(lambda: _build_prompt(state, request), heavy=is_heavy(*given))


def _build_prompt(state: ServerState, request: CountRequest) -> Prompt:
    rules, structured = read_rules(request)
    messages = Converter(state.vocab).convert(request.messages)
    tail = _continued(messages)
    if tail is not None:
        messages, rules = messages[:-1], _without_grammar(rules)
    instructions, said = take_effort(system_text(request.system) or "")
    default = said or state.config.default_reasoning_effort
    effort = reasoning_effort(_effort(request), "output_config.effort", default)
    head = [system_message(state.config, effort)]
    tools = [function.tool for function in rules.functions]
    developer = developer_message(instructions, tools, structured.described)
    if developer is not None:
        head.append(developer)
    most = SIZES["prompt_tokens"].max
    with at("messages"):
        prompt = render_conversation(Conversation((*head, *messages)), state.vocab, most=most)
    header: tuple[int, ...] = ()
    if tail is not None:
        assert tail.channel is not None
        assert isinstance(tail.content, str)
        header = (CHANNEL, *state.vocab.encode(tail.channel), MESSAGE)
        # A thought that was omitted has its text in the signature only, which token_ids are of.
        with at("messages"):
            prompt += tail.token_ids or (*header, *state.vocab.encode(tail.content, most))
    return Prompt(prompt, header, rules)


def read_rules(request: CountRequest) -> tuple[TurnRules, Structured]:
    """What the turn may look like. Raises ``RequestError``."""
    functions, choice = read_tools(request.tools or [], request.tool_choice)
    given = request.output_config.format if request.output_config is not None else None
    structured = read_format(given, "output_config.format")
    rules = TurnRules(
        functions=functions, choice=choice, answer=structured.constraint, thinking_budget=request.budget
    )
    return rules, structured


def _effort(request: CountRequest) -> str | None:
    if request.effort is not None or request.budget is None:
        return request.effort
    if request.budget < _LOW_BUDGET:
        return "low"
    return "high" if request.budget >= _HIGH_BUDGET else "medium"


def _continued(messages: list[Message]) -> Message | None:
    """The assistant's message that the request ends with: the model goes on from its text.

    There may be no message at all: blocks that say nothing here (encrypted by another server) are none.
    """
    if not messages or messages[-1].role != "assistant":
        return None
    last = messages[-1]
    if last.recipient is not None:
        raise RequestError("messages: a tool_use at the end needs its tool_result", param="messages")
    return last


def _without_grammar(rules: TurnRules) -> TurnRules:
    """A grammar holds for whole turns; what only tidies calls is left off when one is continued."""
    kept = [replace(function, text=None) for function in rules.functions]
    rules = replace(rules, functions=kept)
    if rules.binds:
        raise RequestError(
            "messages: an answer cannot be continued together with thinking, a format or a choice of tools",
            param="messages",
            code="unsupported_value",
        )
    return rules
