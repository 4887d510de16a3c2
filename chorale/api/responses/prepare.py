"""From a ResponsesRequest to what a turn takes: load the chain, resolve references, encode the prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from chorale.api.choice import TurnOptions
from chorale.api.ids import new_id
from chorale.api.prompt import THREAD_CHARS, developer_message, system_message
from chorale.api.responses.conversation import Group, Window, encode, split_instructions, to_groups
from chorale.api.responses.items import parse_items, same_output
from chorale.api.responses.request import ResponsesRequest
from chorale.api.responses.stored import Item, StoredItem
from chorale.api.responses.tools import ToolSet, read_tools
from chorale.api.sampling import resolve_sampling
from chorale.api.state import ServerState
from chorale.engine.types import SamplingSpec
from chorale.errors import NotFoundError
from chorale.harmony.messages import Message
from chorale.harmony.render import DropAnalysis

NEVER = 1 << 30  # tokens: a turn that is not streamed is read once, at its end
_RESERVE = 4096  # tokens for the answer when old items are cut and no limit was asked for


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    tools: ToolSet
    input: tuple[StoredItem, ...]  # this request's own items, as they are stored


@dataclass(frozen=True, slots=True)
class Prepared:
    response_id: str
    prompt: Prompt
    sampling: SamplingSpec
    options: TurnOptions


async def prepare(state: ServerState, request: ResponsesRequest, owner: bytes) -> Prepared:
    """Raises ``RequestError`` for whatever is wrong with the request, or does not fit the window."""
    prompt = await build_prompt(state, request, owner)
    sampling = resolve_sampling(
        request,
        state.client.info,
        state.vocab,
        num_prompt_tokens=len(prompt.token_ids),
        max_tokens=request.max_output_tokens,
        logprobs=request.num_logprobs,
        prompt_param="input",
    )
    response_id = new_id("resp")
    options = TurnOptions(
        request_id=response_id,
        function_names=prompt.tools.names,
        stop=tuple(request.stop or ()),
        include_stop=bool(request.include_stop_str_in_output),
        parallel_tool_calls=request.parallel_tool_calls,
        stream_interval=state.config.stream_interval if request.stream else NEVER,
        ensure_answer=not request.ignore_eos,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        arrival_time=time.time(),
    )
    return Prepared(response_id, prompt, sampling, options)


async def build_prompt(state: ServerState, request: ResponsesRequest, owner: bytes) -> Prompt:
    tools = read_tools(request.tools, request.tool_choice)
    history: list[StoredItem] = []
    if request.previous_response_id is not None:
        for response in await state.store.chain(request.previous_response_id, owner):
            history += [*response.input, *response.output]
    own = await resolve_items(state, parse_items(request.input or []), owner)
    items = history + own
    instructions, num_leading = split_instructions(request.instructions, items)
    groups = to_groups(items[num_leading:], len(history) - num_leading)
    head = [system_message(state.config, request.harmony_effort, request.chat_template_kwargs.model_identity)]
    developer = developer_message(instructions, tools.functions)
    if developer is not None:
        head.append(developer)
    return Prompt(await _encode(state, request, head, groups), tools, tuple(own))


async def resolve_items(state: ServerState, items: list[Item], owner: bytes) -> list[StoredItem]:
    """References become the items they name; items the model made get their exact token ids back."""
    wanted = [
        item["id"]
        for item in items
        if item["type"] in ("item_reference", "function_call", "reasoning") or item.get("role") == "assistant"
    ]
    found = await state.store.items(wanted, owner) if wanted else {}
    return [_resolve(item, found.get(item["id"]), position) for position, item in enumerate(items)]


def _resolve(item: Item, stored: StoredItem | None, position: int) -> StoredItem:
    if item["type"] == "item_reference":
        if stored is None:
            raise NotFoundError(
                f"input[{position}]: no item with id {item['id'][:128]!r} is stored",
                param=f"input[{position}].id",
                code="item_not_found",
            )
        return stored
    if stored is not None and same_output(stored.item, item):
        return stored
    return StoredItem(item)


async def _encode(
    state: ServerState, request: ResponsesRequest, head: Sequence[Message], groups: Sequence[Group]
) -> list[int]:
    """Long texts are encoded in a thread, so that other streams go on."""
    max_len = state.client.info.max_model_len
    reserve = min(request.max_output_tokens or _RESERVE, max_len // 4)
    window = Window(max_len, reserve, request.truncation == "auto")
    rule: DropAnalysis = "none" if request.reasoning.context == "all_turns" else "before_last_final"
    size = sum(len(m.content) for group in groups for m in group if isinstance(m.content, str))
    size += sum(len(repr(message.content)) for message in head)
    if size > THREAD_CHARS:
        return await asyncio.to_thread(encode, head, groups, state.vocab, rule, window)
    return encode(head, groups, state.vocab, rule, window)
