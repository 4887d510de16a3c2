"""Bounds on a turn that does not end by itself, regardless of its token limit.

They are far above the needs of a productive turn. A turn that reaches one while reasoning is given the header
of its answer, if it has none yet (like a turn that ended without one); any other is incomplete. With
``ignore_eos``, only the token limit applies.
"""

from __future__ import annotations

from collections.abc import Sequence

from chorale.grammar.frames import MAX_REASONING

MAX_ANALYSIS = MAX_REASONING  # reasoning messages of one round (grammars have the same bound)
MAX_MESSAGES = 2 * MAX_ANALYSIS  # messages of any kind of one round
MAX_CALL_BYTES = 256 * 1024  # arguments of one call to a built-in tool, as UTF-8
LOOP_TOKENS = 2048  # reasoning or a call loops if this many tokens at its end repeat a pattern ...
LOOP_PERIOD = 128  # ... of at most this length
MAX_SAME_RESULTS = 8  # equal calls with equal results in a row, to a built-in tool
MAX_SAME_CALLS = 32  # equal calls in a row with any results: the model may be polling
_CHECK_TOKENS = 256  # between two searches for a pattern


class RoundWatch:
    """Counts the output of one round."""

    __slots__ = ("_call_bytes", "_num_analysis", "_num_messages", "next_check")

    def __init__(self) -> None:
        self._num_messages = 0
        self._num_analysis = 0
        self._call_bytes = 0
        self.next_check = LOOP_TOKENS  # tokens of the round at which ``loops`` searches for a pattern

    def message(self, *, analysis: bool) -> bool:
        """Counts a message. Returns whether it exceeds the limit."""
        self._num_messages += 1
        self._num_analysis += analysis
        self._call_bytes = 0
        return self._num_messages > MAX_MESSAGES or self._num_analysis > MAX_ANALYSIS

    def call(self, text: str) -> bool:
        """Counts arguments of a call. Returns whether they are too long."""
        self._call_bytes += len(text.encode("utf-8", "surrogatepass"))
        return self._call_bytes > MAX_CALL_BYTES

    def loops(self, tokens: Sequence[int], start: int) -> bool:
        """Returns whether the round, ``tokens[start:]``, ends in a repeated pattern. Checks rarely."""
        num_tokens = len(tokens) - start
        if num_tokens < self.next_check:
            return False
        self.next_check = num_tokens + _CHECK_TOKENS
        return is_periodic(tokens[-LOOP_TOKENS:], LOOP_PERIOD)


def is_periodic(tokens: Sequence[int], longest: int) -> bool:
    """Returns whether ``tokens`` repeat a pattern of at most ``longest``."""
    last = tokens[-1]
    for period in range(1, min(longest, len(tokens) - 1) + 1):
        if tokens[-1 - period] == last and tokens[period:] == tokens[:-period]:
            return True
    return False


class CallWatch:
    """Counts equal calls in a row within a turn."""

    __slots__ = ("_call", "_num_calls", "_num_results", "_result")

    def __init__(self) -> None:
        self._call: tuple[str, str] | None = None
        self._result = ""
        self._num_calls = self._num_results = 0

    @property
    def repeats(self) -> bool:
        """Returns whether the same call was made too often."""
        return self._num_calls >= MAX_SAME_CALLS or self._num_results >= MAX_SAME_RESULTS

    def called(self, recipient: str, content: str, result: str) -> None:
        call = recipient, content
        same_call = call == self._call
        same_result = same_call and result == self._result
        self._num_calls = self._num_calls + 1 if same_call else 1
        self._num_results = self._num_results + 1 if same_result else 1
        self._call, self._result = call, result
