"""Choice: the state machine of one harmony choice. Tokens in, OutputEvents out; synchronous, no I/O.

``feed`` and the other methods that return a ``Need`` say what the choice needs next (``needs.py``); nothing
more is read until the need is met. All parts write to one ``Emitter``: ``ItemWriter`` (the model's messages),
``ToolUse`` (calls to built-in tools) and ``Compactor`` (summaries).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chorale.engine.types import TokenChunk
from chorale.errors import ChoraleError
from chorale.harmony.messages import ContentDelta, HarmonyEvent, MessageEnd, MessageStart, Repair, Terminator
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import START, Vocabulary
from chorale.tools.contract import Progress, ToolResult
from chorale.turns.choice.compactor import Compactor
from chorale.turns.choice.emitter import Emitter
from chorale.turns.choice.item import OpenItem, Token
from chorale.turns.choice.items import ItemWriter
from chorale.turns.choice.reader import Read, RoundReader
from chorale.turns.choice.rounds import Rounds
from chorale.turns.choice.tool_use import ToolUse
from chorale.turns.direct import Found
from chorale.turns.events import EndReason, ItemStatus, ToolProgressed, Usage, chunk_error
from chorale.turns.needs import ENDED, CallTool, Compact, Ended, Need, NextRound
from chorale.turns.request import TurnRequest


class AnyChoice:
    """What harmony choices and raw ones share: their events, and their end."""

    def __init__(self, vocab: Vocabulary, request: TurnRequest, index: int, eos: frozenset[int]) -> None:
        self.index = index
        self._vocab = vocab
        self._request = request
        self._eos = eos
        self._need: Need | None = None
        self._out = Emitter(len(request.prompt_token_ids), request.stream_interval, progress=request.progress)
        self.take = self._out.take

    def fail(self, error: ChoraleError) -> Ended:
        """Ends with an error, after everything that was produced."""
        return self.end("error", error=error)

    def end(
        self,
        reason: EndReason,
        stop_reason: str | int | None = None,
        error: ChoraleError | None = None,
        *,
        keep_tail: bool = True,
    ) -> Ended:
        """Closes open items and emits ``TurnEnded``. Idempotent. ``keep_tail``: show held-back text."""
        if self._need is not ENDED:
            self._need = ENDED
            self._out.usage.output_tokens = len(self._out.sampled)
            reason = self._close(reason, keep_tail=keep_tail)
            self._out.end(reason, stop_reason, error, self._tool_state())
        return ENDED

    def _close(self, reason: EndReason, *, keep_tail: bool) -> EndReason:
        """Closes open items. Returns the reason of the end."""
        raise NotImplementedError

    def _tool_state(self) -> dict[str, Any] | None:
        return None


class Choice(AnyChoice):
    """Takes the chunks of one choice; ``take`` returns its events."""

    def __init__(self, vocab: Vocabulary, request: TurnRequest, index: int, eos: frozenset[int]) -> None:
        super().__init__(vocab, request, index, eos)
        self._forced = False  # the answer was forced after the last tool call
        tools = request.tools
        self._tools = ToolUse(tools[index], request.rules, self._out) if tools else None
        self._compactor = Compactor(request.compaction, self._out)
        self._items = ItemWriter(request, self._out, self._tools)
        self._rounds = Rounds(request, self._out, self._tools)
        self._tool_names = self._items.tool_names
        self._new_round(request.prefill_token_ids)

    # ------------------------------------------------------------------ rounds

    def start(self) -> Need | None:
        """Returns a need that precedes the request's own generation, or None. Call it once, first."""
        if self._tools is not None:
            self._tools.show_listings()
            if self._request.approved:
                return self._run_approved(0, self._rounds.prompt)
        if self._compactor.is_due_first:
            return self._continue(self._rounds.first(self._rounds.prompt))
        return None

    def begin_round(self, following: NextRound) -> None:
        """Begins the requested round, which has been submitted: its chunks follow."""
        self._need = self._out.routed_experts = None
        self._rounds.begin(following)
        self._new_round(following.prefill_token_ids)

    def _new_round(self, prefill: Sequence[int]) -> None:
        sampled, ignore_eos = self._out.sampled, self._request.sampling.ignore_eos
        self._reader = RoundReader(self._vocab, self._tool_names, sampled, ignore_eos=ignore_eos)
        self._on_events(self._reader.prefill(prefill))

    def _continue(self, following: NextRound) -> Need:
        self._need = self._compactor.before(following) or following
        return self._need

    # ------------------------------------------------------------------ tokens in

    def read(self, chunk: TokenChunk) -> Found | None:
        """Takes new tokens. Returns their text if they are only more text of the open item, else the events
        that are due, or None if the choice needs something: ``feed`` then returns what."""
        out, reader, token_ids = self._out, self._reader, chunk.token_ids
        item, sampled = out.item, out.sampled
        if item is not None and item.is_plain and chunk.logprobs is None and not chunk.weight_version:
            is_reasoning = item.kind == "reasoning"
            if not is_reasoning or len(sampled) + len(token_ids) - reader.start < reader.watch.next_check:
                text = reader.parser.read_text(token_ids)
                if text is not None:
                    sampled += token_ids
                    if is_reasoning:
                        out.usage.reasoning_tokens += len(token_ids)
                    return text
        return self.take() if self.feed(chunk) is None else None

    def feed(self, chunk: TokenChunk) -> Need | None:
        """Takes new tokens."""
        if self._need is not None:
            return self._need
        out, reader = self._out, self._reader
        sampled, token_ids, logprobs = out.sampled, chunk.token_ids, chunk.logprobs
        if not sampled or chunk.finish_reason or chunk.routed_experts is not None or chunk.weight_version:
            out.on_chunk(chunk)
        num_shown = len(token_ids)
        if chunk.stop_token_id is not None and not self._shows_stop(chunk.stop_token_id):
            num_shown -= 1
        for position in range(num_shown):
            token = token_ids[position]
            sampled.append(token)
            entry = logprobs[position] if logprobs is not None else None
            if entry is not None and self._request.progress:
                out.scores.append(entry)
            text = reader.parser.read_text((token,))
            if text is not None:
                self._on_content(text, [(token, entry)])
            else:
                self._on_events(reader.feed(token, entry))
            if self._need is not None:
                return self._need
        sampled.extend(token_ids[num_shown:])
        if logprobs is not None and self._request.progress:
            out.scores += logprobs[num_shown:]
        out.usage.output_tokens = len(sampled)
        return self._need if chunk.finish_reason is None else self._on_finish(chunk)

    def _shows_stop(self, token_id: int) -> bool:
        """The model's own stop ids end a message and the parser must see them; extra ones are hidden."""
        return token_id in self._eos or self._request.include_stop

    def _on_events(self, read: Read) -> None:
        for event, tokens in read:
            self._on_event(event, tokens)
            if self._need is not None:
                return

    def _on_event(self, event: HarmonyEvent, tokens: list[Token]) -> None:
        if isinstance(event, ContentDelta):
            self._on_content(event.text, tokens)
        elif isinstance(event, MessageStart):
            self._on_message_start(event)
        elif isinstance(event, MessageEnd):
            self._on_message_end(event)
        elif isinstance(event, Repair):
            self._out.count_repair(event.kind)

    def _on_message_start(self, start: MessageStart) -> None:
        self._items.close("completed")
        analysis = start.recipient is None and start.channel == "analysis"
        if not (self._reader.watch.message(analysis=analysis) and self._stop_runaway()):
            self._items.open(start)

    def _on_content(self, text: str, tokens: list[Token]) -> None:
        item = self._out.item
        if item is None:  # the parser promises a MessageStart first
            return
        runs_away = item.kind != "message" and self._watch(item, text, len(tokens))
        matched = item.add(text, tokens)
        if matched is not None:
            # The choice is over, even if the engine sends more.
            self.end("stop", matched, keep_tail=False)
        elif runs_away:
            self._stop_runaway()

    def _watch(self, item: OpenItem, text: str, num_tokens: int) -> bool:
        """Counts reasoning and calls to built-in tools. Returns whether the turn is a runaway."""
        watch = self._reader.watch
        if item.call is not None:
            item.call.texts.append(text)
            return watch.call(text) or self._reader.looped
        if item.kind != "reasoning":
            return False
        self._out.usage.reasoning_tokens += num_tokens
        return self._reader.looped

    def _on_message_end(self, event: MessageEnd) -> None:
        cut = event.terminator is Terminator.CUT
        item = self._out.item
        if item is not None and item.call is not None and not cut:
            self._on_call(item, event.token_ids)
            return
        self._items.close("incomplete" if cut else "completed", event.token_ids)
        if self._items.called and not self._request.parallel_tool_calls:
            self.end("tool_calls")

    # ------------------------------------------------------------------ built-in tools

    def _on_call(self, item: OpenItem, token_ids: tuple[int, ...]) -> None:
        """Handles a complete call to a built-in tool."""
        out, reader = self._out, self._reader
        out.usage.output_tokens = len(out.sampled)
        if item.kind == "mcp_approval_request":
            self._items.close("completed", token_ids)
            self.end("stop")
            return
        assert self._tools is not None
        written = out.sampled[reader.start : reader.frames_end]
        self._need = self._tools.take_call(item, token_ids, [*self._rounds.prompt, *written])
        if self._rounds.is_spent:
            self.end("length")  # no room for a result

    def _run_approved(self, number: int, prompt: list[int]) -> Need:
        assert self._tools is not None
        self._need = self._tools.open_approved(self._request.approved[number], number, prompt)
        return self._need

    def tool_progressed(self, call: CallTool, progress: Progress) -> None:
        self._out.emit(ToolProgressed(call.index, progress), urgent=True)

    def tool_done(self, call: CallTool, result: ToolResult, message: list[int]) -> Need:
        """``message``: the result, from ``<|start|>`` to ``<|end|>``, now part of the prompt."""
        assert self._tools is not None
        self._tools.done(call, result, message)
        self._forced = False
        self._items.new_answer()
        prompt = [*call.prompt_token_ids, *message, START, ASSISTANT]
        if call.approved is not None and call.approved + 1 < len(self._request.approved):
            return self._run_approved(call.approved + 1, prompt)
        return self._continue(self._rounds.after_tool(prompt, len(message) + 2))

    # ------------------------------------------------------------------ compaction

    def compaction_progressed(self) -> None:
        """Called twice: when the model begins to reason about the summary, and when it begins to write it."""
        self._compactor.progressed()

    def skip_compaction(self, need: Compact) -> Need:
        """Continues without a summary, for lack of room; no other is tried."""
        self._compactor.stop()
        self._need = need.following
        return self._need

    def compacted(self, need: Compact, packed: str, prompt: list[int], usage: Usage) -> Need:
        """``packed``: the item's text, which ``prompt`` replaces; ``usage``: the summary's token counts."""
        self._compactor.done(packed, prompt, usage)
        if self._compactor.ends_turn:
            self._out.usage.input_tokens = 0  # nothing but the summary was generated
            return self.end("stop")
        is_first = need.following.num_new_tokens is None
        rounds = self._rounds
        self._need = rounds.first(prompt) if is_first else rounds.after_tool(prompt, len(prompt))
        return self._need

    # ------------------------------------------------------------------ ends

    def _on_finish(self, chunk: TokenChunk) -> Need:
        if chunk.finish_reason == "error":
            return self.fail(chunk_error(chunk.error))
        if chunk.finish_reason == "length" or chunk.finish_reason == "abort":
            return self.end(chunk.finish_reason)
        extra = chunk.stop_token_id if chunk.stop_token_id not in self._eos else None
        if extra is None and self._wants_answer:
            self._drain("completed")
            return self._need or self._force_answer()  # the drained text may contain a stop string
        return self.end("tool_calls" if self._items.called else "stop", extra)

    @property
    def _wants_answer(self) -> bool:
        return not (self._request.sampling.ignore_eos or self._items.answered or self._forced)

    def _force_answer(self) -> Need:
        self._forced = True
        self._need = self._rounds.answer(self._reader)
        return self._need

    def _stop_runaway(self) -> bool:
        """Forces the answer of a runaway turn, or ends it as incomplete. Returns whether it is one."""
        if self._request.sampling.ignore_eos or self._need is not None:
            return False
        item = self._out.item
        if (item is None or item.call is None) and self._wants_answer:
            self._force_answer()  # after the last complete message; the open one is not read again
            self._drain("incomplete")
        else:
            self.end("length")
        return True

    def _drain(self, status: ItemStatus, *, keep_tail: bool = True) -> None:
        """Closes all open items."""
        for event, tokens in self._reader.finish():
            if isinstance(event, MessageEnd):
                self._items.close(status, event.token_ids)
            elif keep_tail or not isinstance(event, ContentDelta):
                self._on_event(event, tokens)
        self._items.close(status)

    def _close(self, reason: EndReason, *, keep_tail: bool) -> EndReason:
        self._out.usage.add(self._compactor.spent)
        self._drain("completed" if reason in ("stop", "tool_calls") else "incomplete", keep_tail=keep_tail)
        return "tool_calls" if reason == "stop" and self._items.called else reason

    def _tool_state(self) -> dict[str, Any] | None:
        return self._tools.state() if self._tools is not None else None
