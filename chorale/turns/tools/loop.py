"""The tools that run here, as one choice of a turn sees them: which calls are run, and what comes of them.

A message to a tool of ours ends its round. The tool runs, its result becomes a harmony message, and the next
round begins with everything so far as its prompt. A call to a tool that does not exist is answered too, with
an error that the model reads; so is whatever goes wrong within a tool. None of it fails the turn.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from chorale.harmony.messages import Message
from chorale.harmony.render import render_message
from chorale.harmony.vocab import Vocabulary
from chorale.ids import new_id
from chorale.tools.contract import (
    BrowserDetail,
    McpDetail,
    McpListing,
    Progress,
    PythonDetail,
    SearchAction,
    ToolBox,
    ToolCall,
    ToolIdentity,
    ToolKind,
    ToolResult,
)
from chorale.turns.events import ItemKind, ItemOpened
from chorale.turns.rules import TurnRules
from chorale.turns.runaway import CallWatch

logger = logging.getLogger(__name__)

MAX_CALLS = 128  # of one turn, whatever the request allows: a loop that nobody watches must end
MAX_UNKNOWN = 3  # calls to tools that do not exist, answered with an error; then the answer is forced
MIN_RESULT_TOKENS = 64  # less room than this for a result, and the turn ends for lack of room
ANSWER_TOKENS = 1024  # of the context window, kept free behind a result (a quarter of a small window)
_CUT_NOTE = "\n[cut here: the rest does not fit into the context window]"

ITEM_KINDS: dict[ToolKind, ItemKind] = {
    "browser": "web_search_call",
    "python": "code_interpreter_call",
    "mcp": "mcp_call",
}


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call of an earlier turn that the user approved. ``token_ids``: its message, as the model wrote it."""

    request_id: str
    recipient: str
    name: str
    server_label: str
    arguments: str
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class TurnTools:
    """The tools of one choice, and how much of them it has used."""

    box: ToolBox
    rules: TurnRules
    max_calls: int | None = None
    cites: bool = True  # citation marks become links with annotations
    listings: tuple[McpListing, ...] = ()  # shown as items before anything else
    approved: tuple[ApprovedCall, ...] = ()  # run before the first round
    session_key: str = ""
    on_called: Callable[[str, bool], None] | None = None  # told of each call: its kind, whether it failed
    num_calls: int = 0
    num_unknown: int = 0
    watch: CallWatch = field(default_factory=CallWatch)
    closed: bool = False

    @property
    def calls_left(self) -> bool:
        if self.watch.repeats:
            return False
        limit = MAX_CALLS if self.max_calls is None else min(self.max_calls, MAX_CALLS)
        return self.num_calls < limit

    def may_call(self, recipient: str) -> bool:
        return self.rules.later(self.num_calls).may_use(recipient)

    def grammar(self, max_tokens: int | None, num_reasoning_tokens: int) -> str:
        """Of a round after a tool. ``max_tokens``: what is left of the output."""
        rules = self.rules
        return rules.later_grammar(self.num_calls, self.calls_left, num_reasoning_tokens, max_tokens)

    async def aclose(self) -> None:
        """Idempotent: the turn closes its tools, and so does whoever gives a turn up before it began."""
        if not self.closed:
            self.closed = True
            await self.box.aclose()

    def state(self) -> dict[str, Any]:
        return {"session": self.session_key, "box": self.box.state()}

    def takes(self, recipient: str) -> bool:
        """Whether a call to it is run, or at least answered. False: its text is reasoning, nothing else."""
        if not self.calls_left or self.num_unknown >= MAX_UNKNOWN:
            return False
        return self.may_call(recipient) or recipient not in self.box.recipients

    def identify(self, recipient: str) -> ToolIdentity | None:
        """None: there is no such tool."""
        return self.box.identify(recipient) if self.may_call(recipient) else None

    def opened(self, index: int, identity: ToolIdentity) -> ItemOpened:
        """The item of a call."""
        kind = ITEM_KINDS[identity.kind]
        if kind == "mcp_call" and identity.needs_approval:
            kind = "mcp_approval_request"
        container = self.box.container_id if kind == "code_interpreter_call" else None
        label = identity.server_label if identity.kind == "mcp" else None
        return ItemOpened(
            index=index,
            item_id=new_id(ITEM_PREFIX[kind]),
            kind=kind,
            name=identity.name,
            namespace=label,
            container_id=container,
        )


ITEM_PREFIX: dict[ItemKind, str] = {
    "web_search_call": "ws",
    "code_interpreter_call": "ci",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
}


@dataclass(slots=True)
class PendingCall:
    """A call whose text is whole, until its result is part of the prompt.

    ``written``: every token of its round, up to and without the terminator of the call. ``number``: of an
    approved call, its place among them.
    """

    index: int
    recipient: str
    content: str
    channel: str
    item_id: str
    token_ids: tuple[int, ...]
    written: list[int]
    identity: ToolIdentity | None  # None: there is no such tool
    number: int | None = None
    result: ToolResult | None = None


async def run_call(tools: TurnTools, call: PendingCall) -> AsyncGenerator[Progress]:
    """Progress as it comes; ``call.result`` is set at the end, whatever happened."""
    if call.identity is None:
        tools.num_unknown += 1
        call.result = _unknown(tools, call.recipient)
        return
    tools.num_calls += 1
    request = ToolCall(call.recipient, call.content, call.item_id)
    try:
        async with aclosing(tools.box.call(request)) as news:
            async for entry in news:
                if isinstance(entry, ToolResult):
                    call.result = entry
                    break
                yield entry
    except Exception:  # a fault of ours within a tool: the model is told, the operator reads the log
        logger.exception("the tool %s failed", call.recipient)
    if call.result is None:
        call.result = _failed(call, "The tool failed and gave no result.")
    tools.watch.called(call.recipient, call.content, call.result.content)
    if tools.on_called is not None:
        tools.on_called(call.identity.kind, call.result.failed)


def render_result(call: PendingCall, vocab: Vocabulary, room: int) -> list[int] | None:
    """The message of a result, of at most ``room`` tokens; None when there is no room worth using."""
    assert call.result is not None
    message = Message(
        "tool",
        call.result.content,
        name=call.result.author,
        recipient="assistant",
        channel=call.channel,
    )
    token_ids = render_message(message, vocab)
    if len(token_ids) <= room:
        return token_ids
    if room < MIN_RESULT_TOKENS:
        return None
    overhead = len(render_message(replace(message, content=_CUT_NOTE), vocab)) + 4
    kept = vocab.decode(vocab.encode(call.result.content)[: room - overhead]).removesuffix("\ufffd")
    return render_message(replace(message, content=kept + _CUT_NOTE), vocab)


def _unknown(tools: TurnTools, recipient: str) -> ToolResult:
    names = sorted(name for name in tools.box.recipients if tools.may_call(name))
    names += sorted(f"functions.{name}" for name in tools.rules.callable_names)
    offer = f"You can call: {', '.join(names)}." if names else "Answer without tools."
    text = f"Error: the tool {recipient} does not exist. {offer}"
    return ToolResult(recipient, text, True, McpDetail("", recipient, "", None, text))


def _failed(call: PendingCall, message: str) -> ToolResult:
    assert call.identity is not None
    kind, identity = call.identity.kind, call.identity
    detail: BrowserDetail | PythonDetail | McpDetail
    if kind == "browser":
        detail = BrowserDetail(SearchAction(""))
    elif kind == "python":
        detail = PythonDetail("", call.content, message)
    else:
        detail = McpDetail(identity.server_label, identity.name, call.content, None, message)
    return ToolResult(call.recipient, f"Error: {message}", True, detail)
