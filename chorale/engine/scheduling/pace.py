"""PromptPace: limits the prompt tokens of a step while streams run.

A stream gets one token a step, so the time of a step's prompt chunks delays every stream. While streams run,
the chunks of a step together may take

* ``prompt_delay`` seconds, or as long as the streams' own tokens take, whichever is longer;
* proportionally more if more than ``_FEW`` prompts wait, so that a burst is computed about as fast as without
  streams;
* never more than ``max_prompt_delay`` or ``prompt_delay``, whichever is longer.

Such a step may always compute ``least_chunk`` prompt tokens, and more if many prompts wait: fewer would save
little where the fixed part of a step takes most of its time. A further prompt gets a chunk only if a least
chunk fits into the remaining time. So a device on which a least chunk takes about the whole bound computes
one prompt per step while few wait. Far into a prompt, where attention takes most of the time, the least chunk
is shorter.

The operator may add two limits, as in vLLM. A sequence gets at most ``long_prefill`` tokens of a step if it
is not the only one. Prompts are computed in every ``prefill_interval``-th step only, unless there are no
streams, or the last step with prompts left some in the queue.

The cost of a token is learned from past steps. Only steps of at least the least chunk raise it: in shorter
steps the fixed part dominates, and a higher cost would make the next chunks shorter still. Without streams,
the token budget is the only bound.

The cost of a prompt token grows with its position, because attention reads all tokens before it. Costs are
kept by position, in ranges that double. The cost of a range without a measurement is the lowest upper bound
from the measured ranges: a lower range's cost times the ratio of the positions (the cost grows at most in
proportion to the position), or a higher range's cost. Chunks in which every position is scored
(``prompt_logprobs``) cost many times as much and are counted separately.
"""

from __future__ import annotations

import math

from chorale.engine.plan import StepRecord
from chorale.engine.types import EngineLimits

_RANGE = 1024  # positions of the first range; each further range ends at twice the position
_FEW = 8  # the bound grows in proportion to the number of waiting prompts above this
_LEAST_LEFT = 1 / 16  # fraction of the bound below which no further prompt gets a chunk in this step
_PROMPTS, _MOST_CHUNKS = 4, 4  # one more least chunk for every 4 waiting prompts, up to 4
_TAIL = 1.25  # a prompt that ends within this multiple of its chunk is computed to its end
_BATCH_LEAST = 4  # the least chunk of batch prompts is this many times smaller
_MOST = 4.0  # largest factor by which one step changes a cost, because it may have waited for a graph
_FLAT = 16_384  # up to this position attention is a small part, and the least chunk is not shortened


class PromptPace:
    """Limits the prompt tokens of steps. Call ``begin`` for a step, ``fit`` and ``spend`` for each of its
    chunks, and ``observe`` with its time."""

    def __init__(self, limits: EngineLimits) -> None:
        self._delay = limits.prompt_delay
        self._max_delay = max(limits.prompt_delay, limits.max_prompt_delay)
        self._first_cost = limits.prompt_delay / limits.least_chunk
        self._least_chunk = limits.least_chunk
        self._least = limits.least_chunk  # tokens, for the step that is being planned
        self._bound = math.inf  # seconds, for the step that is being planned
        self._costs: tuple[dict[int, float], dict[int, float]] = ({}, {})  # plain, scored: range -> seconds
        self._decodes: dict[int, float] = {}  # bit length of the number of rows -> seconds of a step
        self._left = math.inf
        self._num_scheduled = 0.0  # tokens; those of chunks with a smaller least chunk count more
        self._limits = limits
        self._most_tokens: float = math.inf  # of a sequence, in the step that is being planned
        self._since_prompts = limits.prefill_interval  # steps since the last one with prompts
        self.is_held = False  # the step that is being planned gets no prompts, because of the interval
        self._is_behind = False  # the last step with prompts left some in the queue

    def begin(self, num_streams: int, num_prompts: int) -> None:
        """Begin planning a step. ``num_prompts`` counts all uncomputed prompts, admitted or not."""
        self._bound = math.inf
        self._least = self._least_chunk * min(max(1, num_prompts // _PROMPTS), _MOST_CHUNKS)
        if num_streams and self._delay:
            wanted = max(self._delay * max(1.0, num_prompts / _FEW), self._alone(num_streams))
            self._bound = min(wanted, self._max_delay)
        self._left, self._num_scheduled = self._bound, 0.0
        waits = self._since_prompts < self._limits.prefill_interval
        self.is_held = num_streams > 0 and waits and not self._is_behind
        self._most_tokens = math.inf
        if self._limits.long_prefill and num_streams + num_prompts > 1:
            share = self._limits.max_num_batched_tokens // (num_streams + num_prompts)
            self._most_tokens = max(self._limits.long_prefill, share * self._limits.long_prefill_share)

    def end(self, num_waiting: int, *, has_chunks: bool) -> None:
        """End planning a step that will run. ``num_waiting``: sequences that are left in the queue."""
        self._since_prompts = 1 if has_chunks else self._since_prompts + 1
        if not self.is_held:
            self._is_behind = num_waiting > 0

    def begin_batch(self, seconds: float) -> None:
        """Begin planning the batch work of a step, whose chunks may take ``seconds``.

        The least chunk is divided by ``_BATCH_LEAST``: the batch runs slower, but other requests wait less.
        """
        self._least = max(1, self._least_chunk // _BATCH_LEAST)
        if seconds > 0 and self._delay:
            self._bound = self._left = seconds
        self._num_scheduled = 0.0

    @property
    def least_batch_seconds(self) -> float:
        """Returns the estimated seconds of a least chunk of batch work at the beginning of a prompt."""
        return max(1, self._least_chunk // _BATCH_LEAST) * self.cost(0)

    @property
    def spent(self) -> float:
        """Returns the estimated seconds of the chunks planned since ``begin`` or ``begin_batch``."""
        return 0.0 if self._bound == math.inf else self._bound - self._left

    def decode_seconds(self, num_rows: int) -> float:
        """Return the estimated seconds of a decode-only step of ``num_rows`` rows; 0 if unknown."""
        return self._alone(num_rows) if num_rows else 0.0

    @property
    def is_open(self) -> bool:
        """Returns whether another prompt may get a chunk in this step. The first always may."""
        if self.is_held:
            return False
        if self._num_scheduled < self._least or self._bound == math.inf:
            return True
        return self._left > max(self._bound * _LEAST_LEFT, self._least_chunk * self.cost(0))

    def fit(self, start: int, wanted: int, *, scored: bool) -> int:
        """Return how many tokens, beginning at ``start``, this step has time for: 1 to ``wanted``, and at
        least the rest of the least chunk."""
        wanted = int(min(wanted, self._most_tokens))
        if self._left == math.inf:
            return wanted
        least = max(1, int((self._least - self._num_scheduled) * _share(start, scored)))
        # Chunks rarely end further than that; if they do, their steps correct the cost.
        count = max(least, int(self._left / self.cost(start + min(wanted, _RANGE), scored=scored)))
        return wanted if wanted <= count * _TAIL else min(wanted, count)

    def spend(self, start: int, count: int, *, scored: bool) -> None:
        """Count a chunk that was scheduled."""
        self._num_scheduled += count / _share(start, scored)
        if self._left != math.inf:
            self._left -= count * self.cost(start + count, scored=scored)

    def cost(self, position: int, *, scored: bool = False) -> float:
        """Return an upper estimate of the seconds of a prompt token at ``position``."""
        own, costs = _range_of(position), self._costs[scored]
        if own in costs:
            return costs[own]
        bounds = [cost * 2.0 ** max(0, own - other) for other, cost in costs.items()]
        return min(bounds, default=self._first_cost * 2.0**own)

    def observe(self, record: StepRecord, seconds: float) -> None:
        """Learn from a step that ran for ``seconds``."""
        if not self._delay or seconds <= 0:
            return
        rows = record.num_decodes
        if not record.chunks:
            known = self._decodes.get(rows.bit_length(), seconds)
            # Adapt quickly downwards: a first step may have waited for a graph or a kernel.
            weight = 0.75 if seconds < known else 0.25
            self._decodes[rows.bit_length()] = known + weight * (min(seconds, _MOST * known) - known)
            return
        expected: dict[tuple[bool, int], float] = {}
        for chunk in record.chunks:
            middle = chunk.start + chunk.count // 2
            kind = (chunk.scored, _range_of(middle))
            cost = chunk.count * self.cost(middle, scored=chunk.scored)
            expected[kind] = expected.get(kind, 0.0) + cost
        total = sum(expected.values())
        tokens, prompt_tokens = record.plan.num_tokens, sum(chunk.count for chunk in record.chunks)
        spent = self._prompt_seconds(seconds, rows, prompt_tokens / tokens, total)
        # Every step has a fixed part, so tokens of short chunks cost more. Ignore that within the bound.
        if spent < total or (spent > self._delay and prompt_tokens >= self._least_chunk):
            for scored, range_index in expected:
                self._correct(scored, range_index, spent / total)

    def _prompt_seconds(self, seconds: float, rows: int, share: float, expected: float) -> float:
        """Return the seconds that the prompt tokens of a step took; ``share``: their share of its tokens.

        Known if a step of about as many rows without prompts was measured. Otherwise it is ``expected``, but
        at least the share of the time, and at most the time left after a step of fewer rows alone.
        """
        if rows.bit_length() in self._decodes:
            return max(seconds - self._decodes[rows.bit_length()], seconds * share / 2)
        return min(max(expected, seconds * share), seconds - min(self._alone(rows), seconds / 2))

    def _alone(self, rows: int) -> float:
        """Return a lower estimate of the seconds of a decode-only step of ``rows`` rows; 0 if no such step
        was measured."""
        length = rows.bit_length()
        return max((seconds for other, seconds in self._decodes.items() if other <= length), default=0.0)

    def _correct(self, scored: bool, range_index: int, ratio: float) -> None:
        costs, ratio = self._costs[scored], min(ratio, _MOST)
        if range_index in costs:
            costs[range_index] *= math.sqrt(max(ratio, 1 / _MOST))
        else:
            costs[range_index] = self.cost(_position_of(range_index), scored=scored) * ratio


def _share(start: int, scored: bool) -> float:
    """Return the factor of the least chunk: smaller far into a prompt or if every position is scored."""
    return 1 / 4 if scored else max(1 / 4, _FLAT / max(start, _FLAT))


def _range_of(position: int) -> int:
    return (position // _RANGE).bit_length()


def _position_of(range_index: int) -> int:
    return _RANGE << (range_index - 1) if range_index else 0
