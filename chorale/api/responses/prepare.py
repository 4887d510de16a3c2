"""Converts a ResponsesRequest to a TurnRequest: loads the chain, resolves references, encodes the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chorale.api.http.auth import cache_salt
from chorale.api.http.offload import beside, is_heavy
from chorale.api.http.pdfs import read_pdfs
from chorale.api.limits import SIZES
from chorale.api.record import recorded
from chorale.api.responses.items.built_in import BUILT_IN_CALLS, approved_calls
from chorale.api.responses.items.client_calls import TOOL_LISTS
from chorale.api.responses.items.compaction import plan, since_compaction
from chorale.api.responses.items.input import parse_items
from chorale.api.responses.items.references import HEAVY_ITEMS, resolve_items
from chorale.api.responses.items.to_harmony import (
    Group,
    Stripped,
    Window,
    check_outputs,
    encode,
    item_text,
    split_instructions,
    take_efforts,
    to_groups,
)
from chorale.api.responses.prepared import Prepared, Prompt
from chorale.api.responses.request import ResponsesRequest
from chorale.api.responses.tools import ToolSet, is_built_in, read_tools
from chorale.api.state import ServerState
from chorale.errors import invalid, unsupported
from chorale.harmony.messages import ReasoningEffort
from chorale.harmony.vocab import Vocabulary
from chorale.ids import new_id
from chorale.requests.built_in_tools import read_built_in
from chorale.requests.effort import reasoning_effort
from chorale.requests.formats import read_answer
from chorale.requests.prompt import open_message, prompt_head
from chorale.store.protocol import Item, StoredItem
from chorale.tools.contract import BuiltInRequest, ToolBox
from chorale.turns.built_in.availability import check_available
from chorale.turns.built_in.open import TurnTools, close_tools, open_tools
from chorale.turns.compaction import Compaction
from chorale.turns.compaction import reserve as room_for_summary
from chorale.turns.request import check_grammar, turn_request
from chorale.turns.rules import TurnRules

_RESERVE = 4096  # tokens kept free for the answer when old items are dropped, if the request sets no limit


async def prepare(
    state: ServerState, request: ResponsesRequest, owner: bytes, history: Sequence[StoredItem] | None = None
) -> Prepared:
    """Prepares a turn. Raises ``RequestError`` for an invalid request, or if the prompt is too long.

    ``history``: the items of ``previous_response_id``, if the store does not have them.
    """
    prompt = await build_prompt(state, request, owner, history)
    try:
        turn = turn_request(
            request,
            state.client.info,
            state.vocab,
            request_id=new_id("resp"),
            prompt_token_ids=prompt.token_ids,
            rules=prompt.rules,
            max_tokens=request.max_output_tokens,
            logprobs=request.num_logprobs,
            prompt_param="input",
            parallel_tool_calls=request.parallel_tool_calls,
            stream_interval=state.config.stream_interval if request.stream or request.background else None,
            cache_salt=cache_salt(owner, request.cache_salt),
            adapter=state.adapter,
            tools=prompt.built_in,
            approved=prompt.approved,
            compaction=prompt.compaction,
            prefill_token_ids=prompt.prefill,
        )
        turn = recorded(await check_grammar(state.grammars, turn), request.include_record)
        return Prepared(prompt, turn)
    except BaseException:
        await prompt.close()
        raise


async def build_prompt(
    state: ServerState, request: ResponsesRequest, owner: bytes, known: Sequence[StoredItem] | None = None
) -> Prompt:
    """Builds the prompt. A long input is processed in a thread, so that other streams continue."""
    heavy = _is_heavy(request)
    asked = built_in_tools(request)
    # Refuse invalid tools and formats before reading the store.
    await beside(lambda: read_rules(request, read_tools(request.tools, "auto")), heavy=heavy)
    history = list(known or ())
    if known is not None:
        pass
    elif request.previous_response_id is not None:
        history = await state.store.chain(request.previous_response_id, owner)
    elif request.conversation is not None:
        history = await state.store.conversations.history(request.conversation.id, owner)
    raw = request.input or []
    await read_pdfs(state.pdfs, raw, "input", heavy=heavy)
    parsed = await beside(lambda: parse_items(raw), heavy=heavy)
    own = await resolve_items(state.store, state.vocab, parsed, owner)
    items = history + own
    heavy = heavy or len(items) > HEAVY_ITEMS

    def read() -> tuple[ToolSet, TurnRules]:
        check_outputs(items, len(history))
        declared = [stored.item["tools"] for stored in items if stored.item["type"] in TOOL_LISTS]
        tools = read_tools(request.tools, request.tool_choice, declared, asked.names)
        return tools, read_rules(request, tools)

    tools, rules = await beside(read, heavy=heavy)
    if not request.continue_final_message:  # no grammar covers the rest of a message
        rules = replace(rules, strict_level=state.config.tool_strict_level)
    _check_call_limit(request, rules)
    _check_continued(request, rules, own)
    asked = check_available(state.tools, asked, rules)
    rules, built_in = await _open_tools(state, request, owner, asked, rules, items)
    box = built_in[0].box if built_in else None
    try:
        approved = tuple(approved_calls(own, items, box, state.vocab))

        def encode() -> tuple[ReasoningEffort, list[int], Compaction | None, tuple[int, ...]]:
            closed = items[:-1] if request.continue_final_message else items
            stripped = take_efforts(request.instructions, closed)
            default = stripped.effort or state.config.default_reasoning_effort
            mapped = state.config.reasoning_effort_map
            effort = reasoning_effort(request.effort, "reasoning.effort", default, mapped)
            ids, compaction = assemble(state, request, effort, tools, rules, box, stripped)
            prefill = _continue(items[-1].item, ids, state.vocab) if request.continue_final_message else ()
            return effort, ids, compaction, prefill

        effort, token_ids, compaction, prefill = await beside(
            encode, heavy=heavy or is_heavy([stored.item for stored in history])
        )
    except BaseException:
        await close_tools(built_in)
        raise
    return Prompt(
        token_ids, tools, rules, tuple(own), effort, tuple(history), built_in, approved, compaction, prefill
    )


def _check_call_limit(request: ResponsesRequest, rules: TurnRules) -> None:
    if request.max_tool_calls == 0 and rules.choice.mode == "required" and not rules.callable_names:
        raise invalid("max_tool_calls", "must not be 0 if tool_choice requires a call")


def _check_continued(request: ResponsesRequest, rules: TurnRules, own: Sequence[StoredItem]) -> None:
    """Raises ``RequestError`` unless the last item is open text, or if nothing is to be continued."""
    if not request.continue_final_message:
        return
    last = own[-1].item if own else {}
    if last.get("type") != "reasoning" and last.get("role") != "assistant":
        raise invalid("continue_final_message", "the last item must be an assistant message or reasoning")
    if rules.binds:
        what = "structured output, tool_choice or a reasoning budget"
        raise unsupported("continue_final_message", f"cannot be used together with {what}")


def _continue(item: Item, prompt: list[int], vocab: Vocabulary) -> tuple[int, ...]:
    """Appends an open message to ``prompt``, in place. Returns its header."""
    channel = "analysis" if item["type"] == "reasoning" else "final"
    if item.get("phase") == "commentary":
        channel = "commentary"
    header, opened = open_message(channel, item_text(item), vocab, SIZES["prompt_tokens"].max)
    prompt += opened
    return header


def built_in_tools(request: ResponsesRequest) -> BuiltInRequest:
    """Returns the requested built-in tools. Raises ``RequestError`` that names the invalid field."""
    wanted = [
        (f"tools[{position}]", tool) for position, tool in enumerate(request.tools) if is_built_in(tool)
    ]
    return read_built_in(wanted, request.chat_template_kwargs.builtin_tools or [], approvals=True)


async def _open_tools(
    state: ServerState,
    request: ResponsesRequest,
    owner: bytes,
    asked: BuiltInRequest,
    rules: TurnRules,
    items: Sequence[StoredItem],
) -> tuple[TurnRules, tuple[TurnTools, ...]]:
    """Opens the built-in tools, in their state after the conversation's last call if that is stored."""
    calls = [stored.item["id"] for stored in items if stored.item["type"] in BUILT_IN_CALLS]
    return await open_tools(
        state.tool_host,
        asked,
        rules,
        max_calls=request.max_tool_calls,
        state=await state.store.tool_state(calls[-1], owner) if asked.wanted and calls else None,
        known_labels={s.item["server_label"] for s in items if s.item["type"] == "mcp_list_tools"},
    )


def read_rules(request: ResponsesRequest, tools: ToolSet) -> TurnRules:
    """Returns the constraints of the turn. Raises ``RequestError`` if the format is invalid."""
    structured = read_answer(request.text.format, request, "text.format")
    return TurnRules(
        functions=tools.callable,
        choice=tools.choice,
        answer=structured.constraint,
        described=structured.described,
        thinking_budget=request.thinking_token_budget,
    )


def assemble(
    state: ServerState,
    request: ResponsesRequest,
    effort: ReasoningEffort,
    tools: ToolSet,
    rules: TurnRules,
    box: ToolBox | None,
    stripped: Stripped,
) -> tuple[list[int], Compaction | None]:
    """Returns the prompt's token ids and, if requested, how to compact the conversation."""
    items = stripped.items
    instructions, num_leading = split_instructions(stripped.instructions, items)
    identity = request.chat_template_kwargs.model_identity
    head = prompt_head(
        state.config,
        effort,
        instructions,
        tools.descriptions,
        rules.described,
        identity=identity,
        about=tools.about,
        box=box,
    )
    max_len = state.client.info.max_model_len
    reserve = min(request.max_output_tokens or _RESERVE, max_len // 4)
    window = Window(max_len, reserve, request.truncation == "auto")
    drops = request.reasoning.context != "all_turns"

    def groups(items: Sequence[StoredItem]) -> list[Group]:
        return to_groups(since_compaction(items)[num_leading:], rules.freeform)

    def render(groups: Sequence[Group], cut: bool) -> list[int]:
        return encode(head, groups, state.vocab, drops, Window(max_len, room_for_summary(max_len), cut))

    compaction = plan(request, items, groups, render, state.vocab, max_len)
    if compaction is not None and compaction.first_prompt is not None:
        return render(groups(items), False), compaction
    return encode(head, groups(items), state.vocab, drops, window), compaction


def _is_heavy(request: ResponsesRequest) -> bool:
    """Returns whether converting and rendering the request would block the event loop."""
    given = (request.input, request.instructions, request.tools, request.text.format)
    if is_heavy(*given, request.structured_outputs, request.guided_json, request.guided_choice):
        return True
    return any("encrypted_content" in item for item in request.input or [])
