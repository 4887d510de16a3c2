"""The built-in tools of one turn: a ``ToolBox`` for each of its choices. ``ToolUse`` counts their calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chorale.errors import RequestError
from chorale.grammar.checker import GrammarChecker
from chorale.tools.contract import BuiltInRequest, McpListing, ToolBox, ToolService
from chorale.turns.rules import BuiltInTool, TurnRules


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """An earlier turn's call that the user approved. ``token_ids``: its message."""

    request_id: str
    recipient: str
    name: str
    server_label: str
    arguments: str
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class TurnTools:
    """``on_called`` is called after each call with the kind of the tool and whether the call failed.

    ``cites``: citation marks become links; ``listings``: shown as items before anything else.
    """

    box: ToolBox
    session_key: str
    max_calls: int | None = None
    cites: bool = True
    listings: tuple[McpListing, ...] = ()
    on_called: Callable[[str, bool], None] | None = None
    _closed: bool = field(default=False, init=False)

    async def aclose(self) -> None:
        """Closes the box. Idempotent: both the turn and a caller that drops it may close it."""
        if not self._closed:
            self._closed = True
            await self.box.aclose()


@dataclass(frozen=True, slots=True)
class ToolHost:
    """The server's objects that are needed to open tools. ``on_called``: see ``TurnTools``."""

    service: ToolService | None
    grammars: GrammarChecker
    on_called: Callable[[str, bool], None] | None = None


async def open_tools(
    host: ToolHost,
    asked: BuiltInRequest,
    rules: TurnRules,
    *,
    num_choices: int = 1,
    max_calls: int | None = None,
    state: Mapping[str, Any] | None = None,
    known_labels: Collection[str] = (),
) -> tuple[TurnRules, tuple[TurnTools, ...]]:
    """Returns the rules with the tools, and one ``TurnTools`` per choice, which the turn closes.

    ``state``: ``TurnEnded.tool_state`` of the previous response; ``known_labels``: MCP servers whose tools
    are already listed in the conversation.
    """
    if not asked.wanted:
        return rules, ()
    boxes: list[tuple[str, ToolBox]] = []
    try:
        for _ in range(num_choices):
            boxes.append(await _open_box(host, asked, (state or {}) if num_choices == 1 else {}))
        box = boxes[0][1]
        built_in = built_in_tools(box)
        if rules.binds or not rules.choice.is_open:
            built_in = [await _with_sound_schema(host.grammars, tool) for tool in built_in]
    except BaseException:
        for _, box in boxes:
            await box.aclose()
        raise
    listings = tuple(entry for entry in box.listings if entry.server_label not in known_labels)
    tools = [
        TurnTools(
            box=box,
            session_key=key,
            max_calls=max_calls,
            cites=rules.answer is None,
            listings=listings,
            on_called=host.on_called,
        )
        for key, box in boxes
    ]
    return replace(rules, built_in=built_in, calls_left=max_calls != 0), tuple(tools)


async def _open_box(host: ToolHost, asked: BuiltInRequest, state: Mapping[str, Any]) -> tuple[str, ToolBox]:
    """Returns a box and the key of its sessions."""
    assert host.service is not None
    key = str(state.get("session") or secrets.token_hex(16))
    return key, await host.service.open(asked.wanted, session_key=key, state=state.get("box"))


async def close_tools(tools: Sequence[TurnTools]) -> None:
    """Closes the tools of a turn that does not run."""
    for entry in tools:
        await entry.aclose()


async def _with_sound_schema(checker: GrammarChecker, tool: BuiltInTool) -> BuiltInTool:
    """Returns the tool; if its schema does not compile, with one that allows any object."""
    arguments = tool.arguments()
    try:
        await checker.check([arguments] if arguments is not None else [])
    except RequestError:
        return replace(tool, parameters={"type": "object"})
    return tool


def built_in_tools(box: ToolBox) -> list[BuiltInTool]:
    """Returns all tools of a box in the form for rules and grammars."""
    found: list[BuiltInTool] = []
    for namespace in (*box.system_namespaces, *box.developer_namespaces):
        for tool in namespace.tools:
            recipient = f"{namespace.name}.{tool.name}"
            if recipient in box.recipients:
                parameters = tool.parameters if tool.parameters is not None else {"type": "object"}
                found.append(BuiltInTool(recipient, _key(box, recipient), parameters))
        if not namespace.tools and namespace.name in box.recipients:
            found.append(BuiltInTool(namespace.name, _key(box, namespace.name)))
    return found


def _key(box: ToolBox, recipient: str) -> str:
    identity = box.identify(recipient)
    if identity.kind == "mcp":
        return f"mcp:{identity.server_label}:{identity.name}"
    return "web_search" if identity.kind == "browser" else "code_interpreter"
