"""From a ResponsesRequest to what a turn takes: load the chain, resolve references, encode the prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from chorale.api.http.cache_salt import cache_salt
from chorale.api.http.offload import beside, is_heavy
from chorale.api.responses.items.approvals import approved_calls
from chorale.api.responses.items.client_calls import TOOL_LISTS, is_call
from chorale.api.responses.items.compaction import plan, since_compaction
from chorale.api.responses.items.hosted import HOSTED_CALLS, HOSTED_ITEMS
from chorale.api.responses.items.input import parse_items, same_output
from chorale.api.responses.items.to_harmony import (
    Group,
    Said,
    Window,
    check_outputs,
    encode,
    split_instructions,
    take_efforts,
    to_groups,
)
from chorale.api.responses.request import ResponsesRequest
from chorale.api.responses.tools import ToolSet, is_hosted, read_tools
from chorale.api.state import ServerState
from chorale.engine.types import SamplingSpec
from chorale.errors import NotFoundError, RequestError
from chorale.harmony.messages import Message, ReasoningEffort, ResponseFormat
from chorale.harmony.render import DropAnalysis
from chorale.ids import new_id
from chorale.store.protocol import Item, StoredItem
from chorale.tools.contract import ToolBox
from chorale.turns.choice import TurnOptions
from chorale.turns.compaction import Compaction
from chorale.turns.compaction import reserve as room_for_summary
from chorale.turns.prompt.effort import reasoning_effort
from chorale.turns.prompt.encode import developer_message, system_message
from chorale.turns.rules import TurnRules, with_grammar
from chorale.turns.sampling import resolve_sampling
from chorale.turns.structured import Structured, combine, read_format, read_structured
from chorale.turns.tools.built_in import HostedTools, builtin_tools, read_hosted
from chorale.turns.tools.loop import TurnTools
from chorale.turns.tools.open_tools import Plan, check_available, close_tools, open_tools, with_approved

NEVER = 1 << 30  # tokens: a turn that is not streamed is read once, at its end
_HEAVY_ITEMS = 64  # among them may be sealed texts, of which a few kB unpack to megabytes
_RESERVE = 4096  # tokens for the answer when old items are cut and no limit was asked for


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    tools: ToolSet
    rules: TurnRules
    input: tuple[StoredItem, ...]  # this request's own items, as they are stored
    effort: ReasoningEffort
    history: tuple[StoredItem, ...] = ()  # the items before them
    hosted: tuple[TurnTools, ...] = ()  # what the server runs; the turn closes it
    compaction: Compaction | None = None

    async def close(self) -> None:
        """For a prompt that is not answered."""
        await close_tools(self.hosted)


@dataclass(frozen=True, slots=True)
class Prepared:
    response_id: str
    prompt: Prompt
    sampling: SamplingSpec
    options: TurnOptions


async def prepare(
    state: ServerState,
    request: ResponsesRequest,
    owner: bytes,
    history: Sequence[StoredItem] | None = None,
) -> Prepared:
    """Raises ``RequestError`` for whatever is wrong with the request, or does not fit the window.

    ``history``: the items behind ``previous_response_id``, where the store does not have them.
    """
    prompt = await build_prompt(state, request, owner, history)
    try:
        return await _prepare(state, request, prompt, owner)
    except BaseException:
        await prompt.close()
        raise


async def _prepare(state: ServerState, request: ResponsesRequest, prompt: Prompt, owner: bytes) -> Prepared:
    rules = prompt.rules
    sampling = resolve_sampling(
        request,
        state.client.info,
        state.vocab,
        num_prompt_tokens=len(first_prompt(prompt)),
        max_tokens=request.max_output_tokens,
        logprobs=request.num_logprobs,
        prompt_param="input",
    )
    sampling = await with_grammar(state.grammars, rules, request, sampling)
    response_id = new_id("resp")
    options = TurnOptions(
        request_id=response_id,
        function_names=rules.callable_names,
        call_forms=rules.call_forms,
        stop=tuple(request.stop or ()),
        min_tokens=sampling.min_tokens,
        include_stop=bool(request.include_stop_str_in_output),
        parallel_tool_calls=request.parallel_tool_calls,
        stream_interval=state.config.stream_interval if request.stream or request.background else NEVER,
        ensure_answer=not request.ignore_eos,
        ignore_eos=bool(request.ignore_eos),
        priority=request.priority or 0,
        cache_salt=cache_salt(owner, request.cache_salt),
        arrival_time=time.time(),
        tools=prompt.hosted,
        compaction=prompt.compaction,
    )
    return Prepared(response_id, prompt, sampling, options)


def first_prompt(prompt: Prompt) -> list[int]:
    """What the answer will follow, as far as it is known: behind a summary, everything but that."""
    compaction = prompt.compaction
    if compaction is None or compaction.first_prompt is None:
        return prompt.token_ids
    return compaction.rebuild(compaction.pack(""))


async def build_prompt(
    state: ServerState,
    request: ResponsesRequest,
    owner: bytes,
    known: Sequence[StoredItem] | None = None,
) -> Prompt:
    """Long inputs are read and encoded in a thread, so that other streams go on."""
    heavy = _is_heavy(request)
    asked = hosted_tools(request)
    # What is wrong whatever the input says.
    await beside(lambda: read_rules(request, read_tools(request.tools, "auto")), heavy=heavy)
    history = list(known or ())
    if known is not None:
        pass
    elif request.previous_response_id is not None:
        history = await state.store.chain(request.previous_response_id, owner)
    elif request.conversation is not None:
        history = await state.store.conversations.history(request.conversation.id, owner)
    raw = request.input or []
    parsed = await beside(lambda: parse_items(raw), heavy=heavy)
    own = await resolve_items(state, parsed, owner)
    items = history + own
    heavy = heavy or len(items) > _HEAVY_ITEMS

    def read() -> tuple[ToolSet, TurnRules, Structured]:
        check_outputs(items, len(history))
        loaded = [stored.item["tools"] for stored in items if stored.item["type"] in TOOL_LISTS]
        tools = read_tools(request.tools, request.tool_choice, loaded, asked.names)
        return tools, *read_rules(request, tools)

    tools, rules, structured = await beside(read, heavy=heavy)
    _check_call_limit(request, rules)
    wants_search = tools.choice.hosted is not None and "web_search" in tools.choice.hosted
    asked = check_available(state, asked, own_tools=bool(tools.callable), wants_search=wants_search)
    plan = await _plan(state, request, owner, asked, items)
    rules, hosted = await open_tools(state, plan, rules)
    try:
        box = hosted[0].box if hosted else None
        with_approved(hosted, approved_calls(own, items, box, state.vocab))

        def encode() -> tuple[ReasoningEffort, list[int], Compaction | None]:
            said = take_efforts(request.instructions, items)
            default = said.effort or state.config.default_reasoning_effort
            effort = reasoning_effort(request.effort, "reasoning.effort", default)
            identity = request.chat_template_kwargs.model_identity
            system = system_message(state.config, effort, identity, box)
            developer = _Developer(tools, structured.described, box)
            return effort, *assemble(state, request, system, developer, said)

        effort, token_ids, compaction = await beside(
            encode, heavy=heavy or is_heavy([stored.item for stored in history])
        )
    except BaseException:
        await close_tools(hosted)
        raise
    return Prompt(token_ids, tools, rules, tuple(own), effort, tuple(history), hosted, compaction)


@dataclass(frozen=True, slots=True)
class _Developer:
    """What the first developer message has beside the instructions."""

    tools: ToolSet
    answer: ResponseFormat | None
    box: ToolBox | None


def _check_call_limit(request: ResponsesRequest, rules: TurnRules) -> None:
    if request.max_tool_calls == 0 and rules.choice.mode == "required" and not rules.callable_names:
        raise RequestError(
            "max_tool_calls: 0 rules out the call that tool_choice demands", param="max_tool_calls"
        )


def hosted_tools(request: ResponsesRequest) -> HostedTools:
    """What the server is to run. Raises ``RequestError`` naming the field."""
    wanted = [(f"tools[{position}]", tool) for position, tool in enumerate(request.tools) if is_hosted(tool)]
    names = request.chat_template_kwargs.builtin_tools or []
    wanted += builtin_tools(names, "chat_template_kwargs.builtin_tools")
    return read_hosted(wanted, approvals=True)


async def _plan(
    state: ServerState,
    request: ResponsesRequest,
    owner: bytes,
    asked: HostedTools,
    items: Sequence[StoredItem],
) -> Plan:
    """Tools go on where the last call in the conversation left them, if its response is stored."""
    known = {stored.item["server_label"] for stored in items if stored.item["type"] == "mcp_list_tools"}
    calls = [stored.item["id"] for stored in items if stored.item["type"] in HOSTED_CALLS]
    kept = await state.store.tool_state(calls[-1], owner) if asked.wanted and calls else None
    return Plan(asked, request.max_tool_calls, kept, frozenset(known))


def read_rules(request: ResponsesRequest, tools: ToolSet) -> tuple[TurnRules, Structured]:
    """What the turn may look like. Raises ``RequestError`` for the format."""
    structured = combine(
        read_format(request.text.format, "text.format"), read_structured(request), "text.format"
    )
    rules = TurnRules(
        functions=tools.callable,
        choice=tools.choice,
        answer=structured.constraint,
        thinking_budget=request.thinking_token_budget,
    )
    return rules, structured


def assemble(
    state: ServerState, request: ResponsesRequest, system: Message, developer: _Developer, said: Said
) -> tuple[list[int], Compaction | None]:
    """The prompt of a list of items, and how the turn sums it up, if it does."""
    tools, items = developer.tools, said.items
    instructions, num_leading = split_instructions(said.instructions, items)
    head = [system]
    first = developer_message(instructions, tools.descriptions, developer.answer, tools.about, developer.box)
    if first is not None:
        head.append(first)
    max_len = state.client.info.max_model_len
    reserve = min(request.max_output_tokens or _RESERVE, max_len // 4)
    window = Window(max_len, reserve, request.truncation == "auto")
    rule: DropAnalysis = "none" if request.reasoning.context == "all_turns" else "before_last_final"

    def groups(items: Sequence[StoredItem]) -> list[Group]:
        return to_groups(since_compaction(items)[num_leading:], tools.freeform)

    def render(groups: Sequence[Group], cut: bool) -> list[int]:
        return encode(head, groups, state.vocab, rule, Window(max_len, room_for_summary(max_len), cut))

    compaction = plan(request, items, groups, render, state.vocab, max_len)
    if compaction is not None and compaction.first_prompt is not None:
        return render(groups(items), False), compaction
    return encode(head, groups(items), state.vocab, rule, window), compaction


def _is_heavy(request: ResponsesRequest) -> bool:
    """Whether reading and rendering the request would hold up the event loop."""
    given = (request.input, request.instructions, request.tools, request.text.format)
    if is_heavy(*given, request.structured_outputs, request.guided_json, request.guided_choice):
        return True
    return any("encrypted_content" in item for item in request.input or [])


async def resolve_items(
    state: ServerState, items: list[Item], owner: bytes, path: str = "input"
) -> list[StoredItem]:
    """References become the items they name; items the model made get their exact token ids back."""
    wanted = [
        item["id"]
        for item in items
        if item["type"] in ("item_reference", "reasoning")
        or is_call(item)
        or item["type"] in HOSTED_ITEMS
        or item.get("role") == "assistant"
    ]
    found = await state.store.items(wanted, owner) if wanted else {}

    def resolve() -> list[StoredItem]:
        return [_resolve(item, found.get(item["id"]), f"{path}[{i}]") for i, item in enumerate(items)]

    return await beside(resolve, heavy=len(items) > _HEAVY_ITEMS)


def _resolve(item: Item, stored: StoredItem | None, path: str) -> StoredItem:
    if item["type"] == "item_reference":
        if stored is None:
            raise NotFoundError(
                f"{path}: no item with id {item['id'][:128]!r} is stored",
                param=f"{path}.id",
                code="item_not_found",
            )
        return stored
    if stored is not None and same_output(stored.item, item):
        return stored
    return StoredItem(item)
