"""Approval of calls to MCP servers: finds the calls that a request approves."""

from __future__ import annotations

from collections.abc import Sequence

from chorale.api.responses.items.built_in import approvals
from chorale.errors import invalid
from chorale.harmony.messages import tool_call
from chorale.harmony.render import render_message
from chorale.harmony.vocab import Vocabulary
from chorale.store.protocol import StoredItem
from chorale.tools.contract import ToolBox
from chorale.turns.built_in.open import ApprovedCall


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
            found.append(_call(requests[request_id], path, box, vocab))
    return found


def _call(request: StoredItem, path: str, box: ToolBox | None, vocab: Vocabulary) -> ApprovedCall:
    item = request.item
    recipient = _recipient(item["server_label"], item["name"], box) if box is not None else None
    if recipient is None:
        shown = f"{item['name']!r} of the MCP server {item['server_label']!r}"
        raise invalid(path, f"tools no longer contains {shown}")
    return ApprovedCall(
        request_id=item["id"],
        recipient=recipient,
        name=item["name"],
        server_label=item["server_label"],
        arguments=item["arguments"],
        token_ids=request.token_ids or _rendered(recipient, item["arguments"], vocab),
    )


def _recipient(label: str, name: str, box: ToolBox) -> str | None:
    """Returns the name of a tool in the prompt, which may differ from its label and name."""
    for recipient in sorted(box.recipients):
        identity = box.identify(recipient)
        if identity.kind == "mcp" and (identity.server_label, identity.name) == (label, name):
            return recipient
    return None


def _rendered(recipient: str, arguments: str, vocab: Vocabulary) -> tuple[int, ...]:
    """Renders a call as the model writes it, without ``<|start|>assistant`` and the terminator."""
    return tuple(render_message(tool_call(recipient, arguments), vocab)[2:-1])
