"""Whether the tools that a request wants of the server are there, and their box for one turn.

A tool that was asked for and cannot run is a 400, on every endpoint. The exception: coding agents declare web
search and image generation by default, beside tools of their own. Those go on without it (logged once) unless
``tool_choice`` demands it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chorale.api.state import ServerState
from chorale.errors import RequestError
from chorale.tools.contract import ToolBox
from chorale.turns.rules import Hosted, TurnRules, sound_hosted
from chorale.turns.tools.built_in import HostedTools
from chorale.turns.tools.loop import ApprovedCall, TurnTools

logger = logging.getLogger(__name__)


OPTIONAL = frozenset({"web_search", "image_generation"})  # types that agents declare by default


def check_available(
    state: ServerState, hosted: HostedTools, *, own_tools: bool, wants_search: bool = False
) -> HostedTools:
    """What of it this server runs. Raises ``RequestError`` with code ``tool_not_enabled``.

    ``own_tools``: the client has tools of its own, so that optional ones may be left out;
    ``wants_search``: ``tool_choice`` names web search.
    """
    for kind, path in hosted.unserved:
        if not (own_tools and kind in OPTIONAL):
            raise _not_served(path, kind)
        _log_once(kind)
    hosted = replace(hosted, unserved=())
    available = state.tools.available if state.tools is not None else {}
    missing = dict(state.tools.missing) if state.tools is not None else {}
    silent = "; ".join(f"--tool-server {entry}: {why}" for entry, why in missing.items() if ":" in entry)
    places = dict(hosted.paths)
    if hosted.wanted.web_search is not None and "browser" not in available:
        declared = places["web_search"].startswith("tools[")  # no option of its own, which means it
        if not own_tools or wants_search or not declared:
            raise _not_enabled(places["web_search"], "web search", missing.get("browser"), silent)
        _log_once("web_search")
        hosted = hosted.without_web_search()
    if hosted.wanted.code_interpreter is not None and "python" not in available:
        raise _not_enabled(places["code_interpreter"], "the code interpreter", missing.get("python"), silent)
    for server in hosted.wanted.mcp:
        label = server.server_label
        if server.server_url is None and label not in available:
            raise _not_enabled(
                places[f"mcp:{label}"], f"the MCP server {label!r}", missing.get(label), silent
            )
        if server.server_url is not None and "mcp" not in available:
            place = places[f"mcp:{label}"]
            raise RequestError(
                f"{place}.server_url: requests may not name MCP servers by address here (--mcp-requests); "
                "the operator's own go by their label",
                param=f"{place}.server_url",
                code="tool_not_enabled",
            )
    return hosted


def _not_served(path: str, kind: str) -> RequestError:
    return RequestError(
        f"{path}: tools of type {kind[:64]!r} are not served here; leave it out, or offer it as a function",
        param=path,
        code="tool_not_enabled",
    )


def _not_enabled(path: str, what: str, reason: str | None, silent: str = "") -> RequestError:
    """``silent``: the servers of ``--tool-server`` that do not answer. What they offer is unknown."""
    if silent and not reason:
        message = f"{path}: {what} is not available now: {silent} (asked again every few seconds)"
        return RequestError(message, param=path, code="tool_not_enabled")
    why = f" ({reason})" if reason else ""
    return RequestError(
        f"{path}: {what} is not enabled on this server{why}; start it with --tool-server demo, or "
        "--tool-server HOST:PORT of an MCP server",
        param=path,
        code="tool_not_enabled",
    )


_logged: set[str] = set()


def _log_once(name: str) -> None:
    if name not in _logged:
        _logged.add(name)
        logger.warning("%s is declared by clients, but not enabled: they go on without it", name)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a turn needs to open its tools."""

    hosted: HostedTools
    max_calls: int | None = None
    state: Mapping[str, Any] | None = None  # of the response before, as ``TurnTools.state`` gave it
    known_labels: frozenset[str] = frozenset()  # MCP servers whose tools the conversation lists already


async def open_tools(
    state: ServerState, plan: Plan, rules: TurnRules, num_choices: int = 1
) -> tuple[TurnRules, tuple[TurnTools, ...]]:
    """(the rules with what the tools are, one entry a choice). The turn closes the boxes."""
    if not plan.hosted.wanted:
        return rules, ()
    assert state.tools is not None
    kept = plan.state or {}
    boxes: list[ToolBox] = []
    keys: list[str] = []
    try:
        for _ in range(num_choices):
            key = (
                str(kept.get("session") or secrets.token_hex(16))
                if num_choices == 1
                else secrets.token_hex(16)
            )
            keys.append(key)
            boxes.append(await state.tools.open(plan.hosted.wanted, session_key=key, state=kept.get("box")))
        _check_opened(plan.hosted, boxes[0])
        hosted = hosted_of(boxes[0])
        if not rules.choice.is_open or rules.binds:
            hosted = await sound_hosted(state.grammars, hosted)
        rules = replace(rules, hosted=hosted, hosted_calls=plan.max_calls != 0)
    except BaseException:
        for box in boxes:
            await box.aclose()
        raise
    listings = tuple(entry for entry in boxes[0].listings if entry.server_label not in plan.known_labels)
    tools = [
        TurnTools(
            box=box,
            rules=rules,
            max_calls=plan.max_calls,
            cites=rules.answer is None,
            listings=listings,
            session_key=key,
            on_called=state.metrics.tool_called,
        )
        for box, key in zip(boxes, keys, strict=True)
    ]
    return rules, tuple(tools)


async def close_tools(tools: Sequence[TurnTools]) -> None:
    """Of a turn that does not come about."""
    for entry in tools:
        await entry.aclose()


def with_approved(tools: tuple[TurnTools, ...], approved: Sequence[ApprovedCall]) -> None:
    """Calls that run before the first round."""
    for entry in tools:
        entry.approved = tuple(approved)


def _check_opened(hosted: HostedTools, box: ToolBox) -> None:
    """What the service could not give after all, although it is enabled."""
    names = {"browser": "web_search", "python": "code_interpreter"}
    places = dict(hosted.paths)
    for entry in box.unavailable:
        path = places.get(names.get(entry.kind, f"mcp:{entry.label}"), "tools")
        raise _not_enabled(path, entry.label, entry.reason)


def hosted_of(box: ToolBox) -> tuple[Hosted, ...]:
    """Every tool of a box, as rules and grammars see it."""
    found: list[Hosted] = []
    for namespace in (*box.system_namespaces, *box.developer_namespaces):
        for tool in namespace.tools:
            recipient = f"{namespace.name}.{tool.name}"
            if recipient in box.recipients:
                parameters = tool.parameters if tool.parameters is not None else {"type": "object"}
                found.append(Hosted(recipient, _key(box, recipient), parameters))
        if not namespace.tools and namespace.name in box.recipients:
            found.append(Hosted(namespace.name, _key(box, namespace.name)))
    return tuple(found)


def _key(box: ToolBox, recipient: str) -> str:
    identity = box.identify(recipient)
    if identity.kind == "mcp":
        return f"mcp:{identity.server_label}:{identity.name}"
    return "web_search" if identity.kind == "browser" else "code_interpreter"
