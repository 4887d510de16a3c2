"""Calls to built-in tools as items, and their conversion to harmony.

Most of these items do not contain the result, so a stored call is replayed from its exact tokens (call and
result). A call that is known only from the client's item is rendered from that item.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from chorale.api.http.sse import encode
from chorale.errors import invalid
from chorale.harmony.json_text import read_object
from chorale.harmony.messages import JSON_TYPE, Message, tool_call, tool_result
from chorale.harmony.render import render_message
from chorale.harmony.vocab import Vocabulary
from chorale.store.protocol import Item, StoredItem, present
from chorale.tools.contract import (
    BrowserAction,
    FindAction,
    McpDetail,
    McpListing,
    OpenPageAction,
    PythonDetail,
    SearchAction,
    ToolBox,
    ToolResult,
)
from chorale.turns.built_in.open import ApprovedCall
from chorale.turns.events import BUILTIN_ITEMS, FoldedItem, ItemOpened

SOURCES, RESULTS, OUTPUTS = (
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
)
BUILT_IN_CALLS = frozenset({"web_search_call", "code_interpreter_call", "mcp_call"})
BUILT_IN_INPUT: frozenset[str] = BUILTIN_ITEMS | {"mcp_approval_response"}


# --------------------------------------------------------------------------- for the client


def built_in_object(item: FoldedItem, status: str, include: Collection[str]) -> Item:
    """Returns the item in its current state: the text so far, and the result if there is one."""
    opened, outcome = item.opened, item.outcome
    if isinstance(outcome, McpListing) or opened.kind == "mcp_list_tools":
        return _listing(opened, outcome if isinstance(outcome, McpListing) else None)
    detail = outcome.detail if isinstance(outcome, ToolResult) else None
    head: Item = {"id": opened.item_id, "type": opened.kind}
    if opened.kind == "mcp_approval_request":
        return {**head, **_called(opened), "arguments": item.text}
    head["status"] = status
    if opened.kind == "web_search_call":
        action = detail if isinstance(detail, BrowserAction) else written_action(item)
        return {**head, **_web_search(action, include)}
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
            "input_schema": dict(tool.input_schema),
            **present(
                description=tool.description,
                annotations=dict(tool.annotations) if tool.annotations is not None else None,
            ),
        }
        for tool in (listing.tools if listing is not None else ())
    ]
    return {
        "id": opened.item_id,
        "type": "mcp_list_tools",
        "server_label": opened.namespace,
        "tools": tools,
        **present(error=listing.error if listing is not None else None),
    }


def _web_search(action: BrowserAction, include: Collection[str]) -> Item:
    shown = action_object(action)
    if not isinstance(action, SearchAction):
        return {"action": shown}
    if SOURCES in include:
        shown["sources"] = [{"type": "url", "url": source.url} for source in action.sources]
    if RESULTS not in include:
        return {"action": shown}
    found = [
        {"url": source.url, "title": source.title, "snippet": source.snippet} for source in action.sources
    ]
    return {"action": shown, "results": found}


def action_object(action: BrowserAction) -> Item:
    if isinstance(action, SearchAction):
        return {"type": "search", "query": action.query, "queries": [action.query]}
    if isinstance(action, OpenPageAction):
        return {"type": "open_page", "url": action.url}
    return {"type": "find_in_page", "pattern": action.pattern, "url": action.url or ""}


def written_action(item: FoldedItem) -> BrowserAction:
    """Returns the action of a call that never ran, from its incomplete text."""
    given = read_object(item.text)
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


# --------------------------------------------------------------------------- to harmony


def built_in_messages(
    stored: StoredItem, answers: Mapping[str, Item], called: Collection[str]
) -> list[Message]:
    """Converts an item to messages.

    ``answers``: approval responses by the id of their request. ``called``: ids of the approval requests whose
    call is a separate item.
    """
    item, token_ids = stored.item, stored.token_ids or None
    kind = item["type"]
    if kind == "mcp_approval_request":
        return _unapproved(item, token_ids, answers.get(item["id"]), called)
    if kind not in BUILT_IN_CALLS or item["status"] == "incomplete":
        return []  # tool lists are in the prompt's head; calls that never ran have no messages
    if token_ids is not None:  # all tokens of the call, <|call|> and the result
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
    return f"Error: {encode(item['error']).decode()}" if item["error"] else "[the output was not kept]"


def _browser_exchange(item: Item) -> list[Message]:
    action = item["action"]
    if action["type"] == "open_page":
        name, arguments = "open", {"id": action.get("url") or ""}
    elif action["type"] == "find_in_page":
        name, arguments = "find", {"pattern": action.get("pattern") or ""}
    else:
        name, arguments = "search", {"query": action.get("query") or " ".join(action.get("queries") or [])}
    found = item.get("results") or action.get("sources")
    text = encode(found).decode() if found else "[the result was not kept]"
    return _exchange(f"browser.{name}", "analysis", encode(arguments).decode(), text)


def _exchange(recipient: str, channel: str, content: str, result: str) -> list[Message]:
    kind = "code" if channel == "analysis" else JSON_TYPE
    return [
        Message("assistant", content, recipient=recipient, channel=channel, content_type=kind),
        tool_result(recipient, result, channel),
    ]


def _unapproved(
    item: Item, token_ids: tuple[int, ...] | None, answer: Item | None, called: Collection[str]
) -> list[Message]:
    """Renders a call that was not approved, with the reason. An approved call is rendered where it runs."""
    if item["id"] in called or (answer is not None and answer["approve"]):
        return []
    recipient, channel = _mcp_recipient(item)
    text = "The user has not approved this call."
    if answer is not None:
        text = "The user did not approve this call." + (
            f" {answer['reason']}" if answer.get("reason") else ""
        )
    call, result = _exchange(recipient, channel, item["arguments"], text)
    return [replace(call, token_ids=token_ids), result]


def approvals(items: Sequence[StoredItem]) -> tuple[dict[str, Item], set[str]]:
    """Returns approval responses by request id, and the ids of requests whose call is a separate item."""
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


def approved_calls(
    own: Sequence[StoredItem], items: Sequence[StoredItem], box: ToolBox | None, vocab: Vocabulary
) -> list[ApprovedCall]:
    """Returns the calls that the request's own input approves and that have not run yet.

    Raises ``RequestError`` for a response to an unknown approval request, a second response to the same one,
    or a tool that is not in ``box`` (None: the request has no built-in tools).
    """
    requests = {s.item["id"]: s for s in items if s.item["type"] == "mcp_approval_request"}
    _, called = approvals(items)
    found: list[ApprovedCall] = []
    answered: set[str] = set()
    for position, stored in enumerate(own):
        if stored.item["type"] != "mcp_approval_response":
            continue
        path = f"input[{position}].approval_request_id"
        request_id = stored.item["approval_request_id"]
        if request_id not in requests:
            raise invalid(path, f"no approval request with id {request_id[:128]!r}")
        if request_id in answered:
            raise invalid(path, f"{request_id[:128]!r} is answered twice")
        answered.add(request_id)
        if stored.item["approve"] and request_id not in called:
            found.append(_approved(requests[request_id], path, box, vocab))
    return found


def _approved(request: StoredItem, path: str, box: ToolBox | None, vocab: Vocabulary) -> ApprovedCall:
    item = request.item
    recipient = _offered(item["server_label"], item["name"], box) if box is not None else None
    if recipient is None:
        shown = f"{item['name']!r} of the MCP server {item['server_label']!r}"
        raise invalid(path, f"tools no longer contains {shown}")
    return ApprovedCall(
        request_id=item["id"],
        recipient=recipient,
        name=item["name"],
        server_label=item["server_label"],
        arguments=item["arguments"],
        token_ids=request.token_ids or _written(recipient, item["arguments"], vocab),
    )


def _offered(label: str, name: str, box: ToolBox) -> str | None:
    """Returns the name of a tool in the prompt, which may differ from its label and name."""
    for recipient in sorted(box.recipients):
        identity = box.identify(recipient)
        if identity.kind == "mcp" and (identity.server_label, identity.name) == (label, name):
            return recipient
    return None


def _written(recipient: str, arguments: str, vocab: Vocabulary) -> tuple[int, ...]:
    """Renders a call as the model writes it, without ``<|start|>assistant`` and the terminator."""
    return tuple(render_message(tool_call(recipient, arguments), vocab)[2:-1])


def built_in_text(item: Item) -> str:
    """Returns the approximate text of an item in the prompt."""
    return str(item.get("code") or item.get("arguments") or "") + str(item.get("output") or "")
