"""Parses token ids from the model into events, by a table of (state, token kind) -> action. Never raises.

States: HEADER (after ``<|start|>assistant``, where every generation begins), CONTENT (after ``<|message|>``),
BOUNDARY (after ``<|end|>`` or ``<|call|>``), DONE (after ``<|return|>``, ``<|endoftext|>`` or ``finish``).
A malformed stream is read in the most plausible way, with a ``Repair`` event for each fault. Text is
never lost silently: anything that is not part of a header becomes content, except special tokens, which never
become text.

Text is taken for a header until ``<|message|>``, unless it grows too long for one (``BARE_TOKENS``,
``HEADER_TOKENS``): then it is content.
"""

from __future__ import annotations

import codecs
import enum
import functools
import re
from collections.abc import Callable, Iterable, Sequence

from chorale.harmony import vocab as v
from chorale.harmony.header import Header, Marker, Segment, ToolNames, read_header, split_author, split_run_on
from chorale.harmony.messages import (
    ContentDelta,
    HarmonyEvent,
    MessageEnd,
    MessageStart,
    Repair,
    Role,
    Terminator,
)
from chorale.harmony.vocab import Vocabulary

BARE_TOKENS = 8  # text of this length without a marker that does not look like a header is content
HEADER_TOKENS = 64  # a header of this length is searched for content; a power of two

Events = Sequence[HarmonyEvent]

_HEADERISH = re.compile(r"\s*(?:assistant|analysis|commentary|final|to=|functions\.|$)")


class _State(enum.Enum):
    HEADER = enum.auto()
    CONTENT = enum.auto()
    BOUNDARY = enum.auto()
    DONE = enum.auto()


class _Kind(enum.Enum):
    TEXT = enum.auto()
    START = enum.auto()
    CHANNEL = enum.auto()
    CONSTRAIN = enum.auto()
    MESSAGE = enum.auto()
    STOP = enum.auto()  # <|end|>, <|call|>
    LAST = enum.auto()  # <|return|>, <|endoftext|>
    OTHER = enum.auto()  # reserved, <|startoftext|>, out of range


_KINDS = {
    v.START: _Kind.START,
    v.CHANNEL: _Kind.CHANNEL,
    v.CONSTRAIN: _Kind.CONSTRAIN,
    v.MESSAGE: _Kind.MESSAGE,
    v.END: _Kind.STOP,
    v.CALL: _Kind.STOP,
    v.RETURN: _Kind.LAST,
    v.ENDOFTEXT: _Kind.LAST,
}
_TERMINATORS = {
    v.END: Terminator.END,
    v.CALL: Terminator.CALL,
    v.RETURN: Terminator.RETURN,
    v.ENDOFTEXT: Terminator.RETURN,
}
_MARKERS: dict[int, Marker] = {v.CHANNEL: "channel", v.CONSTRAIN: "constrain"}
_NONE: dict[int, str] = {}


@functools.lru_cache(maxsize=4)
def _text_table(vocab: Vocabulary) -> dict[int, str]:
    """Returns the texts of tokens that are complete UTF-8 by themselves. All parsers share and fill it."""
    return {}


class Parser:
    """Reads what the model emits after ``<|start|>assistant``. One per choice; not thread-safe."""

    __slots__ = (
        "_explicit", "_header_ids", "_ids", "_marks", "_names", "_num_pending", "_readable",
        "_reported_end", "_state", "_texts", "_utf8", "_vocab",
    )  # fmt: skip

    def __init__(
        self, vocab: Vocabulary, *, role: Role | None = "assistant", tool_names: Iterable[str] | None = None
    ) -> None:
        """``role``: the author of the message that the prompt has opened; None: the stream begins with
        ``<|start|>``.

        ``tool_names``: full names of the declared tools ("functions.get_weather"). Damaged recipients are
        repaired to one of them; without names, recipients are only cleaned.
        """
        self._vocab = vocab
        self._names = ToolNames(tool_names or ())
        self._texts = _text_table(vocab)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_pending = 0  # content tokens whose bytes are held by the decoder
        self._reported_end = False
        self._ids: list[int] = []  # the message's ids, for MessageEnd
        self._header_ids: list[int] = []
        self._marks: list[tuple[Marker, int]] = []  # each segment's marker and its start in _header_ids
        self._explicit = False  # the header began with <|start|>, so an author comes first
        self._readable = _NONE  # ``_texts`` while tokens can be read by it
        self._state = _State.HEADER if role is not None else _State.BOUNDARY
        self._begin_header(explicit=False)
        if role is None:
            self._state = _State.BOUNDARY

    def read_text(self, token_ids: Sequence[int]) -> str | None:
        """Reads tokens if each is complete content by itself. Returns their text, or None: ``feed`` them."""
        if len(token_ids) == 1:
            text = self._readable.get(token_ids[0])
        else:
            texts = [self._readable.get(token_id, "") for token_id in token_ids]
            text = "".join(texts) if all(texts) else None
        if text is not None:
            self._ids += token_ids
        return text

    def feed(self, token_id: int) -> Events:
        """Returns the events of one token, in order, possibly an empty list. Accepts any integer."""
        kind = _KINDS.get(token_id)
        if kind is None:
            kind = _Kind.TEXT if 0 <= token_id < v.NUM_RANKS else _Kind.OTHER
        out: list[HarmonyEvent] = []
        _TABLE[self._state, kind](self, token_id, out)
        return out

    def feed_all(self, token_ids: Iterable[int]) -> list[HarmonyEvent]:
        """Returns the events of several tokens."""
        return [event for token_id in token_ids for event in self.feed(token_id)]

    def finish(self) -> Events:
        """Ends the generation (limit, abort, stop string). An open message ends with ``CUT``."""
        out: list[HarmonyEvent] = []
        if self._state is _State.CONTENT:
            self._close(Terminator.CUT, out)
        elif self._state is _State.HEADER:
            is_text = not self._marks[1:] and not _HEADERISH.match(self._leading_text())
            if is_text and self._open_run_on(out):
                self._close(Terminator.CUT, out)
            elif self._explicit or self._marks[1:] or not self._is_blank():
                out.append(Repair("cut_header"))
        self._enter(_State.DONE)
        self._reported_end = True
        return out

    # ----------------------------------------------------------------------- header

    def _begin_header(self, *, explicit: bool) -> None:
        self._ids = []
        self._header_ids = []
        self._marks = [("", 0)]
        self._explicit = explicit
        self._enter(_State.HEADER)

    def _on_start(self, token_id: int, out: list[HarmonyEvent]) -> None:
        self._begin_header(explicit=True)

    def _on_restart(self, token_id: int, out: list[HarmonyEvent]) -> None:
        """``<|start|>`` within a header: the header so far had no message, unless it was plain text."""
        self._end_header(Terminator.IMPLICIT, out)
        if not out:
            out.append(Repair("junk_in_header"))
        self._begin_header(explicit=True)

    def _on_implicit_header(self, token_id: int, out: list[HarmonyEvent]) -> None:
        """Handles a token other than ``<|start|>`` after a message's end as if ``<|start|>`` preceded it."""
        out.append(Repair("implicit_start"))
        self._begin_header(explicit=False)
        kind = _KINDS.get(token_id, _Kind.TEXT)
        _TABLE[_State.HEADER, kind](self, token_id, out)

    def _on_header_text(self, token_id: int, out: list[HarmonyEvent]) -> None:
        self._ids.append(token_id)
        self._header_ids.append(token_id)
        if self._runs_on():
            self._open_run_on(out)

    def _on_header_marker(self, token_id: int, out: list[HarmonyEvent]) -> None:
        self._ids.append(token_id)
        self._marks.append((_MARKERS[token_id], len(self._header_ids)))

    def _on_message(self, token_id: int, out: list[HarmonyEvent]) -> None:
        self._strip_author(out)
        self._ids.append(token_id)
        self._open(read_header(self._segments(), self._names), out)

    def _on_header_end(self, token_id: int, out: list[HarmonyEvent]) -> None:
        self._end_header(_TERMINATORS[token_id], out)
        self._enter(_State.DONE if token_id in (v.RETURN, v.ENDOFTEXT) else _State.BOUNDARY)

    def _end_header(self, terminator: Terminator, out: list[HarmonyEvent]) -> None:
        """Ends a header without ``<|message|>``: text in it is content, else it is dropped."""
        if self._open_run_on(out):
            self._close(terminator, out)
        elif self._marks[1:] or not self._is_blank():
            out.append(Repair("cut_header"))

    def _runs_on(self) -> bool:
        """Returns whether the header text is too long, or too unlike a header, to be one."""
        size = len(self._header_ids)
        if size >= HEADER_TOKENS:
            return size & (size - 1) == 0  # at powers of two only, so that a long header costs O(n)
        if self._marks[1:] or size < BARE_TOKENS:
            return False
        text = self._leading_text()
        return _HEADERISH.match(text) is None or ("\n" in text.strip() and "to=" not in text)

    def _open_run_on(self, out: list[HarmonyEvent]) -> bool:
        """Opens the message whose ``<|message|>`` is missing, if it has any content."""
        if self._explicit or self._marks[1:]:
            self._strip_author(out)
        marker, begin = self._marks[-1]
        ids = self._header_ids[begin:]
        data = self._vocab.decode_bytes(ids)
        head, body = split_run_on(marker, data.decode("utf-8", "replace"))
        if not body.strip():
            return False
        header = read_header([*self._segments()[:-1], (marker, head)], self._names)
        out.append(Repair("missing_header"))
        self._open(header, out)
        head_len = len(head.encode())
        num_tokens, position = 0, 0
        for token_id in ids:
            position += len(self._vocab.token_bytes(token_id))
            num_tokens += position > head_len
        self._emit(data[head_len:], num_tokens, out)
        return True

    def _strip_author(self, out: list[HarmonyEvent]) -> None:
        """Removes the author from the leading text, and from the ids if they end where it does."""
        end = self._marks[1][1] if self._marks[1:] else len(self._header_ids)
        text = self._vocab.decode(self._header_ids[:end])
        if not self._explicit and not text.startswith("assistant"):
            return
        author, _ = split_author(text)
        if author != "assistant":
            out.append(Repair("junk_in_header"))
        size, num_bytes = 0, 0
        while size < end and num_bytes < len(author.encode()):
            num_bytes += len(self._vocab.token_bytes(self._header_ids[size]))
            size += 1
        if num_bytes != len(author.encode()):
            return
        del self._header_ids[:size]
        if self._explicit:  # replay writes it again, behind <|start|>
            del self._ids[:size]
        self._marks = [(marker, max(begin - size, 0)) for marker, begin in self._marks]
        self._explicit = False

    def _segments(self) -> list[Segment]:
        ends = [begin for _, begin in self._marks[1:]] + [len(self._header_ids)]
        segments: list[Segment] = []
        for (marker, begin), end in zip(self._marks, ends, strict=True):
            segments.append((marker, self._vocab.decode(self._header_ids[begin:end])))
        if self._explicit:  # one token holds the author's end and following text
            segments[0] = ("", split_author(segments[0][1])[1])
        return segments

    def _leading_text(self) -> str:
        text = self._vocab.decode(self._header_ids)
        return split_author(text)[1] if self._explicit else text

    def _is_blank(self) -> bool:
        return not self._leading_text().strip()

    # ----------------------------------------------------------------------- content

    def _open(self, header: Header, out: list[HarmonyEvent]) -> None:
        out.extend(Repair(kind) for kind in header.repairs if Repair(kind) not in out)
        out.append(MessageStart(header.channel, header.recipient, header.content_type))
        self._utf8.reset()
        self._num_pending = 0
        self._enter(_State.CONTENT)

    def _on_content_text(self, token_id: int, out: list[HarmonyEvent]) -> None:
        self._ids.append(token_id)
        data = self._vocab.token_bytes(token_id)
        if not self._utf8.getstate()[0]:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                pass
            else:
                self._texts[token_id] = text
                out.append(ContentDelta(text, 1))
                return
        self._emit(data, 1, out)

    def _emit(self, data: bytes, num_tokens: int, out: list[HarmonyEvent]) -> None:
        """Emits text through the incremental decoder; the fast path is closed while it holds bytes."""
        text = self._utf8.decode(data)
        self._num_pending += num_tokens
        if text:
            out.append(ContentDelta(text, self._num_pending))
            self._num_pending = 0
        holds_bytes = bool(self._utf8.getstate()[0])
        self._readable = _NONE if holds_bytes else self._texts

    def _on_content_end(self, token_id: int, out: list[HarmonyEvent]) -> None:
        self._close(_TERMINATORS[token_id], out)
        self._enter(_State.DONE if token_id in (v.RETURN, v.ENDOFTEXT) else _State.BOUNDARY)

    def _on_start_in_content(self, token_id: int, out: list[HarmonyEvent]) -> None:
        out.append(Repair("implicit_start"))
        self._close(Terminator.IMPLICIT, out)
        self._begin_header(explicit=True)

    def _on_channel_in_content(self, token_id: int, out: list[HarmonyEvent]) -> None:
        out.append(Repair("channel_in_content"))
        self._close(Terminator.IMPLICIT, out)
        self._begin_header(explicit=False)
        self._on_header_marker(token_id, out)

    def _close(self, terminator: Terminator, out: list[HarmonyEvent]) -> None:
        text = self._utf8.decode(b"", True)
        if text:
            out.append(ContentDelta(text, self._num_pending))
        out.append(MessageEnd(terminator, tuple(self._ids)))
        self._enter(_State.BOUNDARY)

    # ----------------------------------------------------------------------- anywhere

    def _enter(self, state: _State) -> None:
        self._state = state
        self._readable = self._texts if state is _State.CONTENT else _NONE

    def _on_last(self, token_id: int, out: list[HarmonyEvent]) -> None:
        self._enter(_State.DONE)

    def _on_stray(self, token_id: int, out: list[HarmonyEvent]) -> None:
        """Handles a misplaced special token. It is never shown; within content it is kept for replay if the
        vocabulary has it."""
        out.append(Repair("reserved_token"))
        if self._state is _State.CONTENT and 0 <= token_id < v.VOCAB_SIZE:
            self._ids.append(token_id)

    def _on_after_end(self, token_id: int, out: list[HarmonyEvent]) -> None:
        if not self._reported_end:
            self._reported_end = True
            out.append(Repair("tokens_after_end"))


_Action = Callable[[Parser, int, list[HarmonyEvent]], None]

_ROWS: dict[_State, dict[_Kind, _Action]] = {
    _State.HEADER: {
        _Kind.TEXT: Parser._on_header_text,
        _Kind.START: Parser._on_restart,
        _Kind.CHANNEL: Parser._on_header_marker,
        _Kind.CONSTRAIN: Parser._on_header_marker,
        _Kind.MESSAGE: Parser._on_message,
        _Kind.STOP: Parser._on_header_end,
        _Kind.LAST: Parser._on_header_end,
        _Kind.OTHER: Parser._on_stray,
    },
    _State.CONTENT: {
        _Kind.TEXT: Parser._on_content_text,
        _Kind.START: Parser._on_start_in_content,
        _Kind.CHANNEL: Parser._on_channel_in_content,
        _Kind.CONSTRAIN: Parser._on_stray,
        _Kind.MESSAGE: Parser._on_stray,
        _Kind.STOP: Parser._on_content_end,
        _Kind.LAST: Parser._on_content_end,
        _Kind.OTHER: Parser._on_stray,
    },
    _State.BOUNDARY: {
        _Kind.TEXT: Parser._on_implicit_header,
        _Kind.START: Parser._on_start,
        _Kind.CHANNEL: Parser._on_implicit_header,
        _Kind.CONSTRAIN: Parser._on_implicit_header,
        _Kind.MESSAGE: Parser._on_implicit_header,
        _Kind.STOP: Parser._on_stray,
        _Kind.LAST: Parser._on_last,
        _Kind.OTHER: Parser._on_stray,
    },
    _State.DONE: dict.fromkeys(_Kind, Parser._on_after_end),
}
_TABLE = {(state, kind): action for state, row in _ROWS.items() for kind, action in row.items()}
