"""RoundReader: the tokens of one round as harmony events, each piece of text with its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from chorale.engine.types import TokenLogprobs
from chorale.harmony.messages import ContentDelta, HarmonyEvent, MessageEnd, MessageStart, Terminator
from chorale.harmony.parser import Parser
from chorale.harmony.vocab import ENDOFTEXT, MESSAGE, NUM_RANKS, RETURN, Vocabulary
from chorale.turns.choice.item import Token
from chorale.turns.choice.runaway import RoundWatch

ReadEvent = tuple[HarmonyEvent, list[Token]]  # the tokens are those of a ContentDelta
Read = Iterable[ReadEvent]


class RoundReader:
    """One per round. It adds tokens to ``sampled``, the choice's list, before it parses them."""

    def __init__(
        self, vocab: Vocabulary, tool_names: Sequence[str], sampled: list[int], *, ignore_eos: bool
    ) -> None:
        """``ignore_eos``: text after ``<|return|>`` is parsed as another message."""
        self._vocab = vocab
        self._tool_names = tool_names
        self._sampled = sampled
        self._ignore_eos = ignore_eos
        self.parser = Parser(vocab, tool_names=tool_names)
        self._unread: list[Token] = []  # fed, not yet readable as content
        self.start = len(sampled)
        self.frames_end: int | None = None  # sampled tokens up to the end of the last message
        self.watch = RoundWatch()

    @property
    def looped(self) -> bool:
        """Returns whether the round ends in a pattern that repeats."""
        return self.watch.loops(self._sampled, self.start)

    def prefill(self, token_ids: Sequence[int]) -> Read:
        """Parses a header that was written for the model."""
        return [(event, []) for event in self.parser.feed_all(token_ids)]

    def feed(self, token: int, logprobs: TokenLogprobs | None) -> Read:
        """Returns the events of one token. Read them before the next token is fed."""
        self._unread.append((token, logprobs))
        return self._in_order(self.parser.feed(token), token)

    def _in_order(self, parsed: Sequence[HarmonyEvent], token: int) -> Iterator[ReadEvent]:
        for event in parsed:
            yield event, self._tokens_of(event, token)
        if self._ignore_eos and token in (RETURN, ENDOFTEXT):  # within a message, or after its end
            self.parser = Parser(self._vocab, role=None, tool_names=self._tool_names)

    def finish(self) -> Read:
        """Returns the events at the end of the round."""
        return ((event, self._tokens_of(event, None)) for event in self.parser.finish())

    def _tokens_of(self, event: HarmonyEvent, token: int | None) -> list[Token]:
        if isinstance(event, ContentDelta):
            return self._readable(event.num_tokens, token)
        if isinstance(event, MessageEnd):
            self.frames_end = len(self._sampled) - (0 if event.terminator is Terminator.CUT else 1)
            self._unread = []
        elif isinstance(event, MessageStart) and token == MESSAGE:
            self._unread = []  # without a header, unread tokens may be content
        return []

    def _readable(self, num_tokens: int, token: int | None) -> list[Token]:
        """Returns the last ``num_tokens`` content tokens fed. Special tokens are never content."""
        unread = self._unread
        if token is not None and token >= NUM_RANKS:
            self._unread = unread[-1:]
            unread = unread[:-1]
        else:
            self._unread = []
        return unread[-num_tokens:] if num_tokens else []
