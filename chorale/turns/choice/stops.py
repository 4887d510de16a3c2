"""StopFilter: stop strings over text that arrives with its tokens, keeping the two aligned."""

from __future__ import annotations

from chorale.engine.types import TokenLogprobs
from chorale.harmony.text import StopStrings


class StopFilter:
    """Holds back text that may become a stop string, and its tokens.

    A token is released with its first character; one whose characters all belong to the stop string never is.
    """

    __slots__ = ("_held", "_num_early", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool, num_early: int = 0) -> None:
        """``num_early``: number of tokens before which no stop string may end (from ``min_tokens``)."""
        self._num_early = num_early
        self._stops = StopStrings(stops, include=include)
        self._held: list[tuple[int, TokenLogprobs | None, int]] = []  # token, logprobs, characters left

    def feed(
        self, text: str, tokens: list[tuple[int, TokenLogprobs | None]]
    ) -> tuple[str, list[tuple[int, TokenLogprobs | None]], str | None]:
        """Returns the text that may be shown, its tokens, and the matched stop string or None."""
        for position, (token, logprobs) in enumerate(tokens):
            # Several tokens that became readable together share one character run; the last one carries it.
            self._held.append((token, logprobs, len(text) if position == len(tokens) - 1 else 0))
        self._num_early -= len(tokens)
        if self._num_early >= 0:
            emit, matched = self._stops.pass_over(text), None
        else:
            emit, matched = self._stops.feed(text)
        return emit, self._release(len(emit)), matched

    def flush(self) -> tuple[str, list[tuple[int, TokenLogprobs | None]]]:
        """Returns held-back text at the end of a text without a stop string."""
        text = self._stops.flush()
        tokens = [(token, logprobs) for token, logprobs, length in self._held if length >= 0]
        self._held = []
        return text, tokens

    def _release(self, num_chars: int) -> list[tuple[int, TokenLogprobs | None]]:
        released: list[tuple[int, TokenLogprobs | None]] = []
        taken = 0
        for token, logprobs, length in self._held:
            if num_chars <= 0:
                break
            taken += 1
            if length >= 0:
                released.append((token, logprobs))
            if abs(length) > num_chars:
                # Partly shown: keep the remainder, marked negative so that the token goes out only once.
                taken -= 1
                self._held[taken] = (token, logprobs, num_chars - abs(length))
                break
            num_chars -= abs(length)
        self._held = self._held[taken:]
        return released
