"""Calls of tools that the server ran, as items: written for the client, read back, brought to harmony.

What a tool answered is not part of most of these items, so a call that was stored is replayed from its exact
tokens (call and result). One that comes back from a client alone is rendered from what the item still says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from chorale.api.output import BUILTIN_ITEMS, FoldedItem, ItemOpened
from chorale.api.responses.item_fields import read_id, read_status, read_string
from chorale.api.responses.stored import Item, StoredItem
from chorale.errors import RequestError
from chorale.harmony.messages import Message
from chorale.tools.base import (
    BrowserDetail,
    FindAction,
    FindStarted,
    McpDetail,
    McpListing,
    OpenPageAction,
    PageOpening,
    Progress,
    PythonDetail,
    SearchAction,
    SearchStarted,
    ToolResult,
)

SOURCES, RESULTS, OUTPUTS = (
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
)
HOSTED_CALLS = frozenset({"web_search_call", "code_interpreter_call", "mcp_call"})
HOSTED_ITEMS: frozenset[str] = BUILTIN_ITEMS | {"mcp_approval_response"}
_JSON = "<|constrain|>json"
_encode = msgspec.json.Encoder().encode


# --------------------------------------------------------------------------- for the client


def hosted_object(item: FoldedItem, status: str, include: Collection[str]) -> Item:
    """The item as it stands: its text so far, and what came of it if anything has."""
    opened, outcome = item.opened, item.outcome
    if isinstance(outcome, McpListing) or opened.kind == "mcp_list_tools":
        return _listing(opened, outcome if isinstance(outcome, McpListing) else None)
    detail = outcome.detail if isinstance(outcome, ToolResult) else None
    head: Item = {"id": opened.item_id, "type": opened.kind}
    if opened.kind == "mcp_approval_request":
        return {**head, **_called(opened), "arguments": item.text}
    head["status"] = status
    if opened.kind == "web_search_call":
        found = detail if isinstance(detail, BrowserDetail) else BrowserDetail(written_action(item))
        return {**head, **_web_search(found, include)}
    if opened.kind == "code_interpreter_call":
        return {**head, **_code(opened, item.text, detail, include)}
    result = detail if isinstance(detail, McpDetail) else None
    return {
        **head,
        **_called(opened),
        "arguments": item.text,
        "output": result.output if result is not None else None,
        "error": _mcp_error(result.error) if result is not None and result.error is not None else None,
        "approval_request_id": opened.approval_request_id,
    }


def _called(opened: ItemOpened) -> Item:
    return {"server_label": opened.namespace, "name": opened.name}


def _mcp_error(text: str) -> Item:
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}


def _listing(opened: ItemOpened, listing: McpListing | None) -> Item:
    tools = [
        {
            "name": tool.name,
            "description": tool.description,
            "input_schema": dict(tool.input_schema),
            "annotations": dict(tool.annotations) if tool.annotations is not None else None,
        }
        for tool in (listing.tools if listing is not None else ())
    ]
    return {
        "id": opened.item_id,
        "type": "mcp_list_tools",
        "server_label": opened.namespace,
        "tools": tools,
        "error": listing.error if listing is not None else None,
    }


def _web_search(detail: BrowserDetail, include: Collection[str]) -> Item:
    action = action_object(detail.action)
    if not isinstance(detail.action, SearchAction):
        return {"action": action}
    sources = detail.action.sources
    if SOURCES in include:
        action["sources"] = [{"type": "url", "url": source.url} for source in sources]
    if RESULTS not in include:
        return {"action": action}
    found = [{"url": source.url, "title": source.title, "snippet": source.snippet} for source in sources]
    return {"action": action, "results": found}


def action_object(action: SearchAction | OpenPageAction | FindAction) -> Item:
    if isinstance(action, SearchAction):
        return {"type": "search", "query": action.query, "queries": [action.query]}
    if isinstance(action, OpenPageAction):
        return {"type": "open_page", "url": action.url}
    return {"type": "find_in_page", "pattern": action.pattern, "url": action.url or ""}


def action_of_progress(progress: Progress) -> SearchAction | OpenPageAction | FindAction | None:
    """What a browser call is about to do."""
    if isinstance(progress, SearchStarted):
        return SearchAction(progress.query)
    if isinstance(progress, PageOpening):
        return OpenPageAction(progress.url)
    return FindAction(progress.pattern, progress.url) if isinstance(progress, FindStarted) else None


def written_action(item: FoldedItem) -> SearchAction | OpenPageAction | FindAction:
    """Of a call that never ran, from what the model wrote of it."""
    try:
        given = msgspec.json.decode(item.text)
    except msgspec.DecodeError:
        given = {}
    given = given if isinstance(given, Mapping) else {}
    if item.opened.name == "open":
        page = given.get("id")
        return OpenPageAction(page if isinstance(page, str) else None)
    if item.opened.name == "find":
        return FindAction(str(given.get("pattern", "")), None)
    return SearchAction(str(given.get("query", "")))


def _code(opened: ItemOpened, text: str, detail: object, include: Collection[str]) -> Item:
    done = detail if isinstance(detail, PythonDetail) else None
    container = done.container_id if done is not None else opened.container_id
    outputs = None
    if OUTPUTS in include and done is not None:
        outputs = [{"type": "logs", "logs": done.logs}] if done.logs else []
    return {"code": text, "container_id": container or opened.container_id or "", "outputs": outputs}


# --------------------------------------------------------------------------- from the client


def _web_search_call(item: Mapping[str, Any], path: str) -> Item:
    action = item.get("action")
    if action is None:
        action = {"type": "search", "query": ""}
    if not isinstance(action, Mapping) or action.get("type") not in ("search", "open_page", "find_in_page"):
        raise _invalid(f"{path}.action", "must be a search, open_page or find_in_page action")
    for key in ("query", "url", "pattern"):
        if not isinstance(action.get(key), str | None):
            raise _invalid(f"{path}.action.{key}", "must be a string")
    queries = action.get("queries") or []
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise _invalid(f"{path}.action.queries", "must be a list of strings")
    results = item.get("results")
    if not isinstance(results, list | None):
        raise _invalid(f"{path}.results", "must be a list")
    parsed = {"id": read_id(item, "ws"), "type": "web_search_call", "status": read_status(item)}
    return {**parsed, "action": dict(action)} | ({"results": results} if results is not None else {})


def _code_interpreter_call(item: Mapping[str, Any], path: str) -> Item:
    code, outputs = item.get("code"), item.get("outputs")
    if not isinstance(code, str | None):
        raise _invalid(f"{path}.code", "must be a string")
    if not isinstance(outputs, list | None):
        raise _invalid(f"{path}.outputs", "must be a list")
    for position, output in enumerate(outputs or []):
        if not isinstance(output, Mapping) or not isinstance(output.get("logs"), str):
            raise RequestError(
                f"{path}.outputs[{position}]: only logs are supported: the model takes text only",
                param=f"{path}.outputs[{position}]",
                code="unsupported_content_type",
            )
    container = item.get("container_id")
    return {
        "id": read_id(item, "ci"),
        "type": "code_interpreter_call",
        "status": read_status(item),
        "code": code or "",
        "container_id": container if isinstance(container, str) else "",
        "outputs": outputs,
    }


def _mcp_call(item: Mapping[str, Any], path: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str | None):
        raise _invalid(f"{path}.output", "must be a string")
    return {
        "id": read_id(item, "mcp"),
        "type": "mcp_call",
        "status": read_status(item),
        **_named(item, path),
        "output": output,
        "error": item.get("error"),
        "approval_request_id": item.get("approval_request_id"),
    }


def _mcp_approval_request(item: Mapping[str, Any], path: str) -> Item:
    return {"id": read_id(item, "mcpr"), "type": "mcp_approval_request", **_named(item, path)}


def _named(item: Mapping[str, Any], path: str) -> Item:
    arguments = item.get("arguments")
    if not isinstance(arguments, str | None):
        raise _invalid(f"{path}.arguments", "must be a string")
    return {
        "server_label": read_string(item, "server_label", path),
        "name": read_string(item, "name", path),
        "arguments": arguments or "{}",
    }


def _mcp_list_tools(item: Mapping[str, Any], path: str) -> Item:
    tools = item.get("tools")
    return {
        "id": read_id(item, "mcpl"),
        "type": "mcp_list_tools",
        "server_label": read_string(item, "server_label", path),
        "tools": tools if isinstance(tools, list) else [],
        "error": item.get("error"),
    }


def _mcp_approval_response(item: Mapping[str, Any], path: str) -> Item:
    approve, reason = item.get("approve"), item.get("reason")
    if not isinstance(approve, bool):
        raise _invalid(f"{path}.approve", "must be true or false")
    if not isinstance(reason, str | None):
        raise _invalid(f"{path}.reason", "must be a string")
    return {
        "id": read_id(item, "mcpa"),
        "type": "mcp_approval_response",
        "approval_request_id": read_string(item, "approval_request_id", path),
        "approve": approve,
        "reason": reason,
    }


PARSERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "web_search_call": _web_search_call,
    "code_interpreter_call": _code_interpreter_call,
    "mcp_call": _mcp_call,
    "mcp_list_tools": _mcp_list_tools,
    "mcp_approval_request": _mcp_approval_request,
    "mcp_approval_response": _mcp_approval_response,
}


def _invalid(path: str, message: str) -> RequestError:
    return RequestError(f"{path}: {message}", param=path)


_SALIENT = {
    "web_search_call": ("action",),
    "code_interpreter_call": ("code",),
    "mcp_call": ("server_label", "name", "arguments"),
    "mcp_approval_request": ("server_label", "name", "arguments"),
}


def same_hosted(stored: Item, given: Item) -> bool:
    """Whether a client sent back what happened here. Optional parts of an action may be missing."""
    for key in _SALIENT.get(given["type"], ()):
        ours, theirs = stored[key], given[key]
        if isinstance(ours, Mapping):
            optional = ("sources", "queries")
            ours = {name: value for name, value in ours.items() if name not in optional and value is not None}
            theirs = {name: theirs.get(name) for name in ours}
        if ours != theirs:
            return False
    return True


# --------------------------------------------------------------------------- to harmony


def hosted_messages(
    stored: StoredItem, answers: Mapping[str, Item], called: Collection[str]
) -> list[Message]:
    """``answers``: approval responses by the request that they answer; ``called``: requests whose call is an
    item of its own."""
    item, token_ids = stored.item, stored.token_ids or None
    kind = item["type"]
    if kind == "mcp_approval_request":
        return _unapproved(item, token_ids, answers.get(item["id"]), called)
    if kind not in HOSTED_CALLS or item["status"] == "incomplete":
        return []  # lists are part of the prompt's head; a call that never ran has nothing to say
    if token_ids is not None:  # the call, <|call|> and the result, to the last token
        return [Message("assistant", "", channel="commentary", token_ids=token_ids)]
    if kind == "mcp_call":
        return _exchange(*_mcp_recipient(item), item["arguments"], _mcp_text(item))
    if kind == "code_interpreter_call":
        logs = "".join(output["logs"] for output in item["outputs"] or ())
        text = logs if item["outputs"] is not None else "[the output was not kept]"
        return _exchange("python", "analysis", item["code"], text)
    return _browser_exchange(item)


def _mcp_recipient(item: Item) -> tuple[str, str]:
    return f"{item['server_label']}.{item['name']}", "commentary"


def _mcp_text(item: Item) -> str:
    if item["output"] is not None:
        return str(item["output"])
    return f"Error: {_encode(item['error']).decode()}" if item["error"] else "[the output was not kept]"


def _browser_exchange(item: Item) -> list[Message]:
    action = item["action"]
    if action["type"] == "open_page":
        name, arguments = "open", {"id": action.get("url") or ""}
    elif action["type"] == "find_in_page":
        name, arguments = "find", {"pattern": action.get("pattern") or ""}
    else:
        name, arguments = "search", {"query": action.get("query") or " ".join(action.get("queries") or [])}
    found = item.get("results") or action.get("sources")
    text = _encode(found).decode() if found else "[the result was not kept]"
    return _exchange(f"browser.{name}", "analysis", _encode(arguments).decode(), text)


def _exchange(recipient: str, channel: str, content: str, result: str) -> list[Message]:
    kind = "code" if channel == "analysis" else _JSON
    return [
        Message("assistant", content, recipient=recipient, channel=channel, content_type=kind),
        Message("tool", result, name=recipient, recipient="assistant", channel=channel),
    ]


def _unapproved(
    item: Item, token_ids: tuple[int, ...] | None, answer: Item | None, called: Collection[str]
) -> list[Message]:
    """A call that did not run: the model learns why. One that runs is rendered where it does."""
    if item["id"] in called or (answer is not None and answer["approve"]):
        return []
    recipient, channel = _mcp_recipient(item)
    text = "The user has not approved this call."
    if answer is not None:
        text = "The user did not approve this call." + (f" {answer['reason']}" if answer["reason"] else "")
    call, result = _exchange(recipient, channel, item["arguments"], text)
    return [replace(call, token_ids=token_ids), result]


def approvals(items: Sequence[StoredItem]) -> tuple[dict[str, Item], set[str]]:
    """(approval responses by the request that they answer, requests whose call is an item of its own)."""
    answers = {
        stored.item["approval_request_id"]: stored.item
        for stored in items
        if stored.item["type"] == "mcp_approval_response"
    }
    called = {
        str(stored.item["approval_request_id"])
        for stored in items
        if stored.item["type"] == "mcp_call" and stored.item.get("approval_request_id")
    }
    return answers, called


def hosted_text(item: Item) -> str:
    """Roughly the text that has to be encoded for it."""
    return str(item.get("code") or item.get("arguments") or "") + str(item.get("output") or "")
