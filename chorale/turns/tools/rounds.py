"""ToolRounds: the part of a choice that runs no tools itself, but knows when one must run, and what follows.

A call is opened like any item. When its text is whole, ``tool_call`` is set and nothing more of the round is
read; ``end_call`` takes the result's message, closes the item and asks for the next round.
"""

from __future__ import annotations

from chorale.harmony.messages import MessageEnd, MessageStart
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import CALL, START
from chorale.ids import new_id
from chorale.tools.contract import Progress, ToolIdentity
from chorale.turns.events import (
    EndReason,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    ItemStatus,
    OutputEvent,
    ToolOutcome,
    ToolProgressed,
    ToolStarted,
    Usage,
)
from chorale.turns.item import OpenItem
from chorale.turns.options import Round, TurnOptions
from chorale.turns.tools.loop import PendingCall, TurnTools

FUNCTIONS = "functions."


class Calling:
    """A call to a tool that runs here, while the model writes it."""

    __slots__ = ("channel", "identity", "item_id", "recipient", "texts")

    def __init__(self, recipient: str, channel: str, identity: ToolIdentity | None, item_id: str) -> None:
        self.recipient = recipient
        self.channel = channel
        self.identity = identity  # None: there is no such tool
        self.item_id = item_id
        self.texts: list[str] = []


class ToolRounds:
    """Base of ``Choice``, which sets these attributes and defines the methods that raise here."""

    usage: Usage
    sampled: list[int]
    next_round: Round | None
    tool_call: PendingCall | None
    tools: TurnTools | None
    _options: TurnOptions
    _prompt: list[int]
    _pending: list[OutputEvent]
    _item: OpenItem | None
    _calling: Calling | None  # the open message is a call to a tool that runs here
    _urgent: bool  # news of tools do not wait for tokens
    _answered: bool
    _forced: bool
    _round_start: int
    _frames_end: int | None

    def end(self, reason: EndReason, stop_reason: str | int | None = None) -> None:
        raise NotImplementedError

    def _new_index(self) -> int:
        raise NotImplementedError

    def _close(self, status: ItemStatus, token_ids: tuple[int, ...]) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError

    def _count_repair(self, kind: str) -> None:
        raise NotImplementedError

    def _begin_tools(self, tools: TurnTools) -> None:
        """What comes before the first round: lists of tools, and calls that the user has approved."""
        for listing in tools.listings:
            index = self._new_index()
            opened = ItemOpened(index, new_id("mcpl"), "mcp_list_tools", namespace=listing.server_label)
            status: ItemStatus = "completed" if listing.error is None else "failed"
            self._pending += [opened, ToolOutcome(index, listing), ItemClosed(index, status)]
        if tools.approved:
            self._begin_approved(tools, 0)

    def _begin_approved(self, tools: TurnTools, number: int) -> None:
        approved = tools.approved[number]
        index, item_id = self._new_index(), new_id("mcp")
        identity = ToolIdentity("mcp", approved.server_label, approved.name)
        self._item = OpenItem(index, "mcp_call")
        self._pending += [
            ItemOpened(
                index,
                item_id,
                "mcp_call",
                name=approved.name,
                namespace=approved.server_label,
                approval_request_id=approved.request_id,
            ),
            ItemDelta(index, approved.arguments),
            ToolStarted(index),
        ]
        self.tool_call = PendingCall(
            index=index,
            recipient=approved.recipient,
            content=approved.arguments,
            channel="commentary",
            item_id=item_id,
            token_ids=approved.token_ids,
            written=list(approved.token_ids),
            identity=identity,
            number=number,
        )

    def _begin_call(self, tools: TurnTools, start: MessageStart) -> bool:
        """Open the item of a call to one of ``tools``. False: it is not for them."""
        recipient = start.recipient
        if recipient is None or not tools.takes(recipient):
            return False
        index = self._new_index()
        identity = tools.identify(recipient)
        if identity is None:
            self._count_repair("undeclared_recipient")
            opened = ItemOpened(index, new_id("rs"), "reasoning")
        else:
            opened = tools.opened(index, identity)
        self._item = OpenItem(index, opened.kind)
        self._calling = Calling(recipient, start.channel, identity, opened.item_id)
        self._pending.append(opened)
        return True

    def _await_tool(self, calling: Calling, event: MessageEnd) -> None:
        """The call is whole: nothing of this round is read any more."""
        item, self._calling = self._item, None
        assert item is not None
        self.usage.output_tokens = len(self.sampled)
        if item.kind == "mcp_approval_request":
            self._close("completed", event.token_ids)
            self.end("stop")
            return
        item.release()
        self._flush()
        self._urgent = True
        if calling.identity is not None:
            self._pending.append(ToolStarted(item.index))
        self.tool_call = PendingCall(
            index=item.index,
            recipient=calling.recipient,
            content="".join(calling.texts),
            channel=calling.channel,
            item_id=calling.item_id,
            token_ids=event.token_ids,
            written=self.sampled[self._round_start : self._frames_end],
            identity=calling.identity,
        )

    @property
    def prompt_with_call(self) -> list[int]:
        """The prompt so far and what was written for it, the pending call included."""
        assert self.tool_call is not None
        return [*self._prompt, *self.tool_call.written, CALL]

    def on_progress(self, progress: Progress) -> None:
        assert self.tool_call is not None
        self._urgent = True
        self._pending.append(ToolProgressed(self.tool_call.index, progress))

    def end_call(self, result_token_ids: list[int]) -> None:
        """The result's message, from ``<|start|>`` to ``<|end|>``: part of the prompt from here on."""
        call, tools = self.tool_call, self.tools
        assert call is not None
        assert call.result is not None
        assert tools is not None
        prompt = [*self.prompt_with_call, *result_token_ids, START, ASSISTANT]
        self.tool_call = self._item = None
        self._urgent = True
        status: ItemStatus = "completed"
        if call.identity is not None:
            status = "failed" if call.result.failed else "completed"
            self._pending.append(ToolOutcome(call.index, call.result))
        tail = (CALL, *result_token_ids[:-1])
        self._pending.append(ItemClosed(call.index, status, (*call.token_ids, *tail)))
        self._answered = self._forced = False
        if call.number is not None and call.number + 1 < len(tools.approved):
            self._prompt = prompt
            self._begin_approved(tools, call.number + 1)
            return
        self.next_round = Round(prompt, (), num_new_tokens=len(result_token_ids) + 2)

    def later_grammar(self, max_tokens: int | None) -> str:
        """Of the next round, after a tool. ``max_tokens``: of the whole output."""
        assert self.tools is not None
        left = None if max_tokens is None else max_tokens - len(self.sampled)
        return self.tools.grammar(left, self.usage.reasoning_tokens)

    def _is_function(self, start: MessageStart) -> bool:
        """Whether it is a call for the client. A bare name that a tool of ours has too is that tool."""
        recipient = start.recipient
        if recipient is None or recipient.removeprefix(FUNCTIONS) not in self._options.function_names:
            return False
        return recipient.startswith(FUNCTIONS) or self.tools is None or not self.tools.box.owns(recipient)
