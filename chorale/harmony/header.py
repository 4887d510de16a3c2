"""Reads message headers, well-formed or not.

A header is a list of segments: the text before any marker, then one segment for each ``<|channel|>`` or
``<|constrain|>``. Every list of segments can be read; irregularities are returned as repairs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from chorale.harmony.messages import Channel, RepairKind

Marker = Literal["", "channel", "constrain"]
Segment = tuple[Marker, str]

CHANNELS: tuple[Channel, ...] = get_args(Channel)
CONTENT_TYPES = frozenset({"json", "code", "text", "python", "markdown", "xml", "yaml", "html"})
NOBODY = frozenset({"", "all", "user", "assistant"})  # recipients that are not a tool

MAX_RECIPIENTS = 4  # only the last ones are considered, which limits the work for a runaway header

_WORDS = re.compile(r"to=\s*(?P<to>\S*)|(?P<word>\S+?)(?=\s|to=|$)")
_SPELLED_MARKER = re.compile(r"<\|(\w*)\|>")
_NAME = re.compile(r"[\w.\-:/]{0,256}")
_GLUED_WORDS = re.compile(r"(?:json|code|commentary|analysis|final|assistant|constrain|channel|message)+")

# The header part of a segment whose text runs on into the content.
_BARE_START = re.compile(r"\s*(?:(?:analysis|commentary|final)\s+)?(?:to=\S+\s*)+(?:(?:json|code)\s+)?")
_CHANNEL_START = re.compile(r"\s*\w*(?:\s*to=\S+)*(?:\s+(?:json|code)\b)?\s*")
_CONSTRAIN_START = re.compile(r"\s*\w*\s*")


@dataclass(frozen=True, slots=True)
class Header:
    channel: Channel
    recipient: str | None
    content_type: str | None
    repairs: tuple[RepairKind, ...]


class ToolNames:
    """The declared full tool names, with a search for the one meant by a damaged name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._exact = frozenset(self._names)

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._exact

    def nearest(self, name: str) -> str | None:
        """Returns the declared name meant by ``name``, or None. ``name`` may have words glued to its
        end, lack the namespace, or be misspelt."""
        if name in self._exact:
            return name
        starts = sorted((n for n in self._names if name.startswith(n)), key=len, reverse=True)
        for start in starts:
            if _GLUED_WORDS.fullmatch(name[len(start) :]):
                return start
        for same in (_last_part, _letters):
            alike = [n for n in self._names if same(n) == same(name)]
            if len(alike) == 1:
                return alike[0]
        return self._misspelt(name)

    def _misspelt(self, name: str) -> str | None:
        """Returns a declared name of the same namespace that differs in few letters, or None."""
        namespace = name[: name.find(".") + 1]
        own = [n.removeprefix(namespace) for n in self._names if n.startswith(namespace)]
        close = difflib.get_close_matches(name.removeprefix(namespace), own, 1, 0.75)
        return namespace + close[0] if close else None


def _last_part(name: str) -> str:
    return _GLUED_WORDS.sub("", name.rpartition(".")[2]) or name


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


class _Reader:
    """One pass over the words of a header."""

    def __init__(self, names: ToolNames) -> None:
        self.names = names
        self.channel: Channel | None = None
        self.recipients: list[str] = []
        self.content_type: str | None = None
        self.last_unknown: str | None = None  # a word that may be an unusual content type
        self.repairs: dict[RepairKind, None] = {}

    def read(self, marker: Marker, text: str) -> None:
        expected = marker
        for match in _WORDS.finditer(text):
            if match["to"] is not None:
                self.recipients.append(self._uncut(match["to"]))
                self._settle_unknown()
                continue
            word = self._uncut(match["word"])
            if expected == "channel":
                self._read_channel(word)
            elif expected == "constrain":
                self.content_type = word or None
            elif word:
                self._read_word(word)
            expected = ""

    def _uncut(self, word: str) -> str:
        """Returns ``word`` up to a marker that was written out as text."""
        if "<|" in word:
            self.repairs["glued_token"] = None
        return word.partition("<|")[0]

    def _read_channel(self, word: str) -> None:
        channel = nearest_channel(word)
        if channel is None and word.lower() in CONTENT_TYPES:
            self.content_type = word
            return
        if self.channel is not None:
            self.repairs["junk_in_header"] = None
        if channel != word:
            self.repairs["unknown_channel"] = None
        self.channel = channel or self.channel

    def _read_word(self, word: str) -> None:
        if word in CHANNELS and self.channel is None:
            self.repairs["junk_in_header"] = None
            self.channel = word
        elif word in self.names:
            self.repairs["junk_in_header"] = None
            self.recipients.append(word)
        elif word.lower() in CONTENT_TYPES:
            self.content_type = word
        else:
            self._settle_unknown()
            self.last_unknown = word

    def _settle_unknown(self) -> None:
        if self.last_unknown is not None:
            self.repairs["junk_in_header"] = None
            self.last_unknown = None

    def result(self) -> Header:
        if self.last_unknown is not None:
            is_type = (
                self.content_type is None and self.channel is not None and self.last_unknown.isidentifier()
            )
            if is_type:
                self.content_type, self.last_unknown = self.last_unknown, None
            self._settle_unknown()
        recipient = self._recipient()
        channel = self.channel
        if channel is None:
            self.repairs["missing_header"] = None
            channel = "final" if recipient is None else "commentary"
        return Header(channel, recipient, self.content_type, tuple(self.repairs))

    def _recipient(self) -> str | None:
        """Return the last valid recipient, or else the last that looks like a name."""
        if len(self.recipients) > 1:
            self.repairs["duplicate_recipient"] = None
        fallback = None
        for written in reversed(self.recipients[-MAX_RECIPIENTS:]):
            match = _NAME.match(written)
            name = match.group().rstrip(".:-/") if match is not None else ""
            meant = self.names.nearest(name) if self.names and name not in NOBODY else None
            if name != written or (meant is not None and meant != name):
                self.repairs["glued_token"] = None
            if meant is not None:
                return meant
            fallback = fallback or name
            if not self.names and name not in NOBODY:
                return name
        return None if fallback is None or fallback in NOBODY else fallback


def read_header(segments: Sequence[Segment], names: ToolNames) -> Header:
    """Return the best reading of a header without its author. Never raises."""
    reader = _Reader(names)
    for marker, text in segments:
        parts = _SPELLED_MARKER.split(text)
        reader.read(marker, parts[0])
        for spelled, rest in zip(parts[1::2], parts[2::2], strict=True):
            reader.repairs["glued_token"] = None
            reader.read(_as_marker(spelled), rest)
    return reader.result()


def _as_marker(spelled: str) -> Marker:
    match spelled:
        case "channel":
            return "channel"
        case "constrain":
            return "constrain"
    return ""


def nearest_channel(word: str) -> Channel | None:
    """Returns the channel whose name ``word`` begins with or is a prefix of, or None."""
    lowered = word.lower()
    for channel in CHANNELS:
        if lowered.startswith(channel) or (len(lowered) >= 2 and channel.startswith(lowered)):
            return channel
    return None


def split_author(text: str) -> tuple[str, str]:
    """Returns (author, rest) of the text right after ``<|start|>``."""
    if text.startswith("assistant"):
        return "assistant", text[len("assistant") :]
    word = re.match(r"\S*", text)
    author = word.group() if word is not None else ""
    if author in CHANNELS or author.startswith("to="):
        return "", text
    return author, text[len(author) :]


def split_run_on(marker: Marker, text: str) -> tuple[str, str]:
    """Returns (header part, content part) of a segment that was not followed by ``<|message|>``."""
    pattern = {"": _BARE_START, "channel": _CHANNEL_START, "constrain": _CONSTRAIN_START}[marker]
    match = pattern.match(text)
    end = match.end() if match is not None else 0
    return text[:end], text[end:]
