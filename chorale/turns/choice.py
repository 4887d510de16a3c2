"""Choice: the state of one choice of a turn. Tokens in, OutputEvents out; synchronous, no I/O.

Routing is by recipient, not by channel: ``functions.*`` is a function call wherever it stands. Items open
when the header is complete and close exactly once, whatever the model does.
"""

from __future__ import annotations

from collections.abc import Sequence

from chorale.engine.types import ChunkTimings, TokenChunk, TokenLogprobs
from chorale.errors import ChoraleError
from chorale.harmony.messages import (
    ContentDelta,
    HarmonyEvent,
    MessageEnd,
    MessageStart,
    Repair,
    Terminator,
)
from chorale.harmony.parser import Parser
from chorale.harmony.render import ASSISTANT, FINAL
from chorale.harmony.vocab import CHANNEL, END, ENDOFTEXT, MESSAGE, NUM_RANKS, RETURN, START, Vocabulary
from chorale.ids import new_id
from chorale.turns.compact_rounds import CompactingRounds
from chorale.turns.events import (
    BUILTIN_ITEMS,
    CLIENT_CALLS,
    Cited,
    EndReason,
    ItemClosed,
    ItemKind,
    ItemOpened,
    ItemStatus,
    OutputEvent,
    Phase,
    TurnEnded,
    TurnProgress,
    Usage,
    chunk_error,
)
from chorale.turns.item import OpenItem, Token
from chorale.turns.options import Round, TurnOptions
from chorale.turns.partial_json import InputReader
from chorale.turns.runaway import RoundWatch
from chorale.turns.stops import StopFilter
from chorale.turns.tools.loop import PendingCall, TurnTools
from chorale.turns.tools.rounds import FUNCTIONS, Calling

__all__ = ["Choice", "Round", "TurnOptions"]

_ID_PREFIX: dict[ItemKind, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "tool_search_call": "tsc",
}


class Choice(CompactingRounds):
    """Feed it this choice's chunks; ``take`` the events. ``ended`` is set with ``TurnEnded``.

    When ``next_round`` is set instead, the turn goes on: submit it, call ``begin_round``, feed on. When
    ``tool_call`` is set, its tool runs first: ``on_progress``, then ``end_call`` with the result's message.
    """

    def __init__(
        self, vocab: Vocabulary, options: TurnOptions, index: int, prompt: list[int], eos: frozenset[int]
    ) -> None:
        self.index = index
        self.usage = Usage(input_tokens=len(prompt))
        self.spent = Usage()  # on summaries of the conversation
        self.ended = False
        self.next_round: Round | None = None
        self.tool_call: PendingCall | None = None
        self.tools: TurnTools | None = options.tools[index] if options.tools else None
        self.sampled: list[int] = []
        self.num_rounds = 0
        self.vocab = vocab
        self._options = options
        self._interval = options.stream_interval
        self._tool_names = [FUNCTIONS + name for name in sorted(options.function_names)]
        if self.tools is not None:
            self._tool_names += sorted(filter(self.tools.may_call, self.tools.box.recipients))
        self._eos = eos
        self._prompt = prompt
        self._grammar_start = len(prompt)  # what follows in later prompts is the grammar's
        self._calling: Calling | None = None  # the open message is a call to a tool that runs here
        self._urgent = False  # news of tools do not wait for tokens
        self._pending: list[OutputEvent] = []
        self._item: OpenItem | None = None
        self._num_items = 0
        self._answered = False  # something a reader sees was opened
        self._called = False
        self._forced = False  # the answer was forced once
        self._repairs: dict[str, int] = {}
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._timings: ChunkTimings | None = None
        self._streamed = False  # a delta went out
        self._num_taken = 0  # sampled tokens at the last take
        self._start_parser(options.prefill_token_ids)
        if self.tools is not None:
            self._begin_tools(self.tools)
        self._await_compaction()

    # ------------------------------------------------------------------ rounds

    def begin_round(self, following: Round) -> None:
        """Go on with another generation of the same choice."""
        self.num_rounds += 1
        self.next_round = None
        prompt = self._prompt = following.prompt_token_ids
        if following.num_new_tokens is not None:
            self._grammar_start = len(prompt)
            self._count_prompt(len(prompt), len(prompt) - following.num_new_tokens)
        self._start_parser(following.prefill_token_ids)

    def _count_prompt(self, size: int, num_repeated: int) -> None:
        """A later model call reads all of its prompt; what an earlier one read or wrote counts as cached."""
        usage = self.usage
        if not self.sampled:  # only approved calls ran so far: this is the first model call
            usage.input_tokens = size
            return
        usage.input_tokens += size
        usage.cached_tokens += num_repeated
        usage.later_input_tokens += size
        usage.later_cached_tokens += num_repeated

    def _start_parser(self, prefill: Sequence[int]) -> None:
        self._parser = Parser(self.vocab, tool_names=self._tool_names)
        self._unread: list[Token] = []  # fed, not yet readable as content
        self._round_start = len(self.sampled)
        self._watch = RoundWatch()
        self._frames_end: int | None = None  # sampled tokens up to the last message's end
        for token in prefill:
            for event in self._parser.feed(token):
                self._on_event(event, None)

    def _answer_round(self) -> Round:
        """The prompt so far, closed, and the header of a final message."""
        header = (CHANNEL, FINAL, MESSAGE)
        prompt = list(self._prompt)
        if self._frames_end is not None:
            prompt += self.sampled[self._round_start : self._frames_end]
            prompt += [END, START, ASSISTANT]
        return Round([*prompt, *header], header, len(prompt) + len(header) - self._grammar_start)

    # ------------------------------------------------------------------ tokens in

    def feed(self, chunk: TokenChunk) -> bool:
        """Take in new tokens. True: ended, or ``next_round`` is set. Chunks after the end are ignored."""
        if self.ended or self.tool_call is not None:
            return True
        if not self.sampled and chunk.num_cached_tokens:
            self.usage.cached_tokens = chunk.num_cached_tokens
        if chunk.timings is not None:
            self._timings = chunk.timings
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = tuple(chunk.prompt_logprobs)
        token_ids, logprobs = chunk.token_ids, chunk.logprobs
        num_shown = len(token_ids)
        if chunk.stop_token_id is not None and not self._shows_stop(chunk.stop_token_id):
            num_shown -= 1
        sampled = self.sampled
        for position in range(num_shown):
            token = token_ids[position]
            sampled.append(token)
            parsed = self._parser.feed(token)
            token_logprobs = logprobs[position] if logprobs is not None else None
            if len(parsed) == 1 and type(parsed[0]) is ContentDelta and not self._unread:
                self._on_content(parsed[0].text, [(token, token_logprobs)])
            else:
                self._feed_slowly(token, token_logprobs, parsed)
            if self.ended or self.tool_call is not None or self.next_round is not None:
                return True
        sampled.extend(token_ids[num_shown:])
        self.usage.output_tokens = len(sampled)
        if chunk.finish_reason is None:
            return False
        self._on_finish(chunk)
        return True

    def _shows_stop(self, token_id: int) -> bool:
        """The model's own stop ids end a message and the parser must see them; extra ones are hidden."""
        return token_id in self._eos or self._options.include_stop

    def _feed_slowly(
        self, token: int, logprobs: TokenLogprobs | None, parsed: Sequence[HarmonyEvent]
    ) -> None:
        self._unread.append((token, logprobs))
        for event in parsed:
            self._on_event(event, token)
            if self.ended or self.next_round is not None:
                return
        if self._options.ignore_eos and token in (RETURN, ENDOFTEXT):  # within a message, or behind its end
            self._parser = Parser(self.vocab, role=None, tool_names=self._tool_names)

    def _on_event(self, event: HarmonyEvent, token: int | None) -> None:
        if isinstance(event, ContentDelta):
            self._on_content(event.text, self._readable(event.num_tokens, token))
        elif isinstance(event, MessageStart):
            self._open(event)
            if token == MESSAGE:  # else content began without a header, and what is unread may be part of it
                self._unread = []
        elif isinstance(event, MessageEnd):
            self._on_message_end(event)
        elif isinstance(event, Repair):
            self._count_repair(event.kind)

    def _readable(self, num_tokens: int, token: int | None) -> list[Token]:
        """The last ``num_tokens`` content tokens fed. A special token is never content: it only ended it."""
        unread = self._unread
        if token is not None and token >= NUM_RANKS:
            self._unread = unread[-1:]
            unread = unread[:-1]
        else:
            self._unread = []
        return unread[-num_tokens:] if num_tokens else []

    # ------------------------------------------------------------------ items

    def _open(self, start: MessageStart) -> None:
        if self._item is not None:
            self._close("completed", ())
        analysis = start.recipient is None and start.channel == "analysis"
        if self._watch.message(analysis=analysis) and self._stop_runaway():
            return
        if self.tools is not None and not self._is_function(start) and self._begin_call(self.tools, start):
            return
        kind, name, phase = self._route(start)
        stop = self._options.stop if phase == "final_answer" else ()
        num_early = self._options.min_tokens - len(self.sampled)
        stops = StopFilter(stop, self._options.include_stop, num_early) if stop else None
        form = self._options.call_forms.get(name) if name is not None else None
        namespace = None
        if form is not None:
            kind, name, namespace = form.kind, form.name, form.namespace
        reader = InputReader() if form is not None and form.wrapped else None
        citations = None
        if kind == "message" and self.tools is not None and self.tools.cites:
            citations = self.tools.box.citation_stream()
        self._item = OpenItem(self._new_index(), kind, stops, reader, citations)
        self._answered = self._answered or kind != "reasoning"
        self._pending.append(
            ItemOpened(
                index=self._item.index,
                item_id=new_id(_ID_PREFIX[kind]),
                kind=kind,
                name=name,
                namespace=namespace,
                call_id=new_id("call") if kind in CLIENT_CALLS else None,
                phase=phase,
            )
        )

    def _new_index(self) -> int:
        self._num_items += 1
        return self._num_items - 1

    def _route(self, start: MessageStart) -> tuple[ItemKind, str | None, Phase | None]:
        recipient = start.recipient
        if recipient is not None:
            name = recipient.removeprefix(FUNCTIONS)
            if name in self._options.function_names:
                return "function_call", name, None
            # Not a tool of this request: its text is kept where a reader finds it, and it is counted.
            self._count_repair("undeclared_recipient")
            if self.tools is not None:
                return "reasoning", None, None  # arguments of a call that cannot run any more
        if start.channel == "analysis":
            return "reasoning", None, None
        if start.channel == "commentary":
            return "message", None, "commentary"
        return "message", None, "final_answer"

    def _on_content(self, text: str, tokens: list[Token]) -> None:
        item = self._item
        if item is None:  # the parser promises a MessageStart first
            return
        runs_away = False
        if self._calling is not None:
            self._calling.texts.append(text)
            runs_away = self._watch.call(text)
        elif item.kind == "reasoning":
            self.usage.reasoning_tokens += len(tokens)
        if self._calling is not None or item.kind == "reasoning":
            runs_away = runs_away or self._watch.loops(self.sampled, self._round_start)
        matched = item.add(text, tokens)
        if matched is not None:
            # The choice is over for us, whatever the engine still sends.
            self._end("stop", matched, None, keep_tail=False)
        elif runs_away:
            self._stop_runaway()

    def _stop_runaway(self) -> bool:
        """The round goes nowhere: force the answer of the turn, or end it as incomplete. False: go on."""
        if self._options.ignore_eos or self.ended or self.next_round is not None:
            return False
        if self._calling is None and self._wants_answer():
            self._force_answer()  # after the last whole message: the open one is not read again
            self._drain_parser("incomplete")
        else:
            self.end("length")
        return True

    def _on_message_end(self, event: MessageEnd) -> None:
        cut = event.terminator is Terminator.CUT
        self._frames_end = len(self.sampled) - (0 if cut else 1)
        self._unread = []
        if self._calling is not None and not cut:
            self._await_tool(self._calling, event)
            return
        self._close("incomplete" if cut else "completed", event.token_ids)
        if self._called and not self._options.parallel_tool_calls:
            self.end("tool_calls")

    def _close(self, status: ItemStatus, token_ids: tuple[int, ...]) -> None:
        item = self._item
        if item is None:
            return
        item.release()
        self._calling = None
        if item.kind in BUILTIN_ITEMS and item.kind != "mcp_approval_request":
            status = "incomplete"  # its tool never ran to its end
        if item.kind in CLIENT_CALLS and status == "completed":
            self._called = True
            if item.is_blank and item.kind != "custom_tool_call":
                item.add_text("{}")  # a call without arguments is still a JSON object
        self._flush()
        self._item = None
        self._pending.append(ItemClosed(item.index, status, token_ids))

    def _flush(self) -> None:
        """Turn the open item's collected text into one delta."""
        delta = self._item.delta() if self._item is not None else None
        if delta is not None:
            self._pending.append(delta)
            self._streamed = True
        if self._item is not None and self._item.cited:
            self._pending += [Cited(self._item.index, citation) for citation in self._item.take_cited()]

    def _count_repair(self, kind: str) -> None:
        self._repairs[kind] = self._repairs.get(kind, 0) + 1

    # ------------------------------------------------------------------ ends

    def _on_finish(self, chunk: TokenChunk) -> None:
        if chunk.finish_reason == "error":
            self.fail(chunk_error(chunk.error))
            return
        if chunk.finish_reason == "length" or chunk.finish_reason == "abort":
            self.end(chunk.finish_reason)
            return
        extra = chunk.stop_token_id if chunk.stop_token_id not in self._eos else None
        if extra is None and self._wants_answer():
            self._drain_parser("completed")
            self._force_answer()
            return
        self.end("tool_calls" if self._called else "stop", stop_reason=extra)

    def _wants_answer(self) -> bool:
        return self._options.ensure_answer and not self._answered and not self._forced

    def _force_answer(self) -> None:
        self._forced = True
        self.next_round = self._answer_round()

    def _drain_parser(self, status: ItemStatus, keep_tail: bool = True) -> None:
        """Close whatever is open. ``keep_tail``: show what the parser still held back."""
        for event in self._parser.finish():
            if isinstance(event, MessageEnd):
                self._frames_end = len(self.sampled)
                self._close(status, event.token_ids)
            elif keep_tail or not isinstance(event, ContentDelta):
                self._on_event(event, None)
        self._close(status, ())

    def end(self, reason: EndReason, stop_reason: str | int | None = None) -> None:
        """Close what is open and emit ``TurnEnded``. Idempotent."""
        self._end(reason, stop_reason, None)

    def fail(self, error: ChoraleError) -> None:
        """End with an error, after everything that was produced."""
        self._end("error", None, error)

    def _end(
        self,
        reason: EndReason,
        stop_reason: str | int | None,
        error: ChoraleError | None,
        keep_tail: bool = True,
    ) -> None:
        if self.ended:
            return
        self.ended = True
        self.next_round = self.tool_call = None
        self.usage.output_tokens = len(self.sampled)
        self.usage.add(self.spent)
        self._drain_parser("completed" if reason in ("stop", "tool_calls") else "incomplete", keep_tail)
        if reason == "stop" and self._called:
            reason = "tool_calls"
        self._pending.append(
            TurnEnded(
                reason=reason,
                usage=self.usage,
                stop_reason=stop_reason,
                error=error,
                num_repairs=sum(self._repairs.values()),
                repairs=dict(self._repairs),
                output_token_ids=tuple(self.sampled),
                prompt_logprobs=self._prompt_logprobs,
                timings=self._timings,
                tool_state=self.tools.state() if self.tools is not None else None,
            )
        )

    # ------------------------------------------------------------------ events out

    def take(self) -> list[OutputEvent]:
        """The events that are due: the first text at once, then every ``stream_interval`` tokens."""
        num_new = len(self.sampled) - self._num_taken
        if self._streamed and num_new < self._interval and not (self.ended or self._urgent):
            return []
        self._urgent = False
        self._flush()
        events = self._pending
        if not events and not (num_new and self._options.progress):
            return events
        self._pending = []
        if self._options.progress:
            fresh = tuple(self.sampled[self._num_taken :])
            events.insert(0, TurnProgress(fresh, self.usage.copy()))
        self._num_taken = len(self.sampled)
        return events
