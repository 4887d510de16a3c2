"""Grammars of rows: compiled while steps run, one matcher a row, masks filled while the device computes.

A row's mask for step n + 1 needs the token of step n. The worker enqueues the forward pass of n + 1 first (it
finds that token on the device) and then asks for masks. Only then, and only if such rows are in the step,
does the host wait for the result of step n, advance the matchers, and fill and send the masks. On a GPU the
host thus fills masks while the device runs the forward pass, with or without async scheduling; rows without a
grammar cost nothing.

A row gets a new matcher with its ``RowStart``, which holds all tokens so far: the matcher of a preempted
sequence is advanced to where it was. A token that a step in flight sampled for the old matcher goes to the
old matcher, which is no longer used.

A row with a draft needs a mask after each of the draft's tokens. A copy of its matcher walks along the draft
and is dropped; the row's own matcher takes the tokens that the row keeps, once they are known.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher

from chorale.engine.types import NO_DRAFT, RowStart, SamplingSpec
from chorale.grammar.matcher import MASK_WORDS, check_grammar, compile_grammar
from chorale.grammar.matcher import warm as warm_tokenizer
from chorale.harmony.vocab import VOCAB_SIZE
from chorale.runtime.device import Arrays, Device

CACHE_BYTES = 256 * 1024 * 1024  # eight agents with 128 tools of ten described arguments each
# The memory of a used grammar, estimated from its text: 127 kB for 233 bytes, 367 kB for 1,342, 1,110 kB for
# 5,092 (tests/runtime/sampling/test_grammar_weight.py). Half or more is lexer states, which all copies of a
# matcher share and create when used: 128 tools (103 kB) take 4.8 MiB unused, 7.1 after 16, 17.1 after all.
_ENTRY_BYTES = 96 * 1024
_PER_BYTE = 208
_PARALLEL_FROM = 8  # rows; below, one thread is faster
_NUM_MASK_BUFFERS = 4  # steps whose masks are kept: those of two may still be on their way to the device
WRONG_VOCABULARY = f"grammars need the harmony vocabulary of {VOCAB_SIZE} tokens"
Fetch = Callable[[], Arrays]


class GrammarCache:
    """Compiled grammars by their text, and the threads that compile them. The engine's ``GrammarService``."""

    def __init__(self, vocab_size: int, cache_bytes: int = CACHE_BYTES) -> None:
        self._vocab_size, self._cache_bytes = vocab_size, cache_bytes
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._size = 0
        self._warming: threading.Thread | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._checks = ThreadPoolExecutor(2, thread_name_prefix="grammar-check")  # no admitted request waits

    def warm(self) -> None:
        """Begins to build the tokenizer in a thread; ``wait_warm`` before the first step waits for its end.

        It holds the interpreter's lock for half a second, which every running stream would notice later.
        """
        if self._vocab_size == VOCAB_SIZE:
            self._warming = warm_tokenizer()

    def wait_warm(self) -> None:
        if self._warming is not None:
            self._warming.join()

    def prepare(self, sampling: SamplingSpec, context: Sequence[int]) -> Future[str | None]:
        return self._threads.submit(self._prepare, sampling.grammar, list(context))

    def check(self, grammar: str) -> Future[str | None]:
        return self._checks.submit(self._check, grammar)

    def _check(self, grammar: str) -> str | None:
        if self._vocab_size != VOCAB_SIZE:
            return WRONG_VOCABULARY
        try:
            check_grammar(grammar)
        except Exception as error:  # errors of the compiler concern this request alone
            return str(error)
        return None

    def _prepare(self, grammar: str, context: list[int]) -> str | None:
        if self._vocab_size != VOCAB_SIZE:
            return WRONG_VOCABULARY
        try:
            matcher = self.matcher(grammar)
        except Exception as error:  # errors of the compiler concern this request alone
            return f"the grammar cannot be used: {error}"
        if not matcher.consume_tokens(context):
            return "the end of the prompt does not match the grammar"
        return None

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a new matcher at its start. Raises ``ValueError`` if the grammar does not compile."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found.deep_copy()
        compiled = compile_grammar(grammar)
        copy = compiled.deep_copy()
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = compiled
                self._size += weight(grammar)
            while self._size > self._cache_bytes and len(self._compiled) > 1:
                self._size -= weight(self._compiled.popitem(last=False)[0])
        return copy

    def close(self) -> None:
        for threads in (self._threads, self._checks):
            threads.shutdown(wait=False, cancel_futures=True)


def weight(grammar: str) -> int:
    """Estimated bytes of the compiled grammar."""
    return _ENTRY_BYTES + _PER_BYTE * len(grammar)


@dataclass(slots=True)
class _Row:
    """``unread``: what fetches the last step's tokens, the row's first place among them, and its draft."""

    matcher: LLMatcher | None  # None: it did not compile, or met a token that does not fit
    unread: tuple[Fetch, int, list[int]] | None = None

    def catch_up(self) -> LLMatcher | None:
        """Feed the tokens that the row kept of its last step, waiting for that step."""
        if self.unread is not None:
            fetch, place, draft = self.unread
            self.unread = None
            tokens = fetch()[0][place : place + 1 + len(draft)].tolist()
            for token, expected in zip(tokens, [*draft, None], strict=True):
                if self.matcher is not None and token >= 0 and not self.matcher.consume_token(token):
                    self.matcher = None
                if token != expected:
                    break
        return self.matcher


@dataclass(frozen=True, slots=True)
class Masks:
    """Allowed tokens of some places of a batch. ``octets`` [G, V / 8] uint8: a bit a token, lowest first."""

    places: npt.NDArray[np.int64]  # [G] ascending
    octets: torch.Tensor

    def at(self, places: npt.NDArray[np.int64]) -> Masks | None:
        """Return the masks of some ascending places of the batch, numbered by their order; None if there are
        none."""
        found = np.flatnonzero(np.isin(self.places, places))
        if not len(found):
            return None
        octets = self.octets if len(found) == len(self.places) else self.octets[found.tolist()]
        return Masks(np.searchsorted(places, self.places[found]), octets)


def allow_all_masks(device: Device, count: int) -> Masks:
    """Make ``count`` masks that allow every token."""
    words = np.full((count, MASK_WORDS), -1, np.int32)
    return Masks(np.arange(count), device.upload(words).view(torch.uint8))


class GrammarRows:
    """The matchers of the rows, used by the worker's thread only."""

    def __init__(self, device: Device, cache: GrammarCache) -> None:
        self._device, self._cache = device, cache
        self._rows: dict[int, _Row] = {}
        self._executor: LLExecutor | None = None  # made with the first large batch
        self._mask_buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.int32)] * _NUM_MASK_BUFFERS
        self._num_filled = 0

    def start(self, start: RowStart) -> None:
        """Set up a row's matcher and advance it past the tokens that the sequence has."""
        self._rows.pop(start.row, None)
        sampling = start.sampling
        if not sampling.grammar:
            return
        try:
            matcher: LLMatcher | None = self._cache.matcher(sampling.grammar)
        except ValueError:
            matcher = None  # cannot happen: it was compiled before admission
        known = start.token_ids[start.num_prompt_tokens - sampling.grammar_context :].tolist()
        if matcher is not None and not matcher.consume_tokens(known):
            matcher = None
        self._rows[start.row] = _Row(matcher)

    def masks(self, rows: npt.NDArray[np.int32], drafts: npt.NDArray[np.int32] | None = None) -> Masks | None:
        """Return the masks of the sampled ``rows`` of a step, or None if none of them has a grammar.

        ``drafts``: as of ``SampledPlaces``. A row whose matcher has failed gets an empty mask, and therefore
        no token.
        """
        found = self._with_grammar(rows, drafts)
        if not found:
            return None
        matchers: list[LLMatcher | None] = []
        for _, row, draft in found:
            matchers += _along(row.catch_up(), draft)
        buffer = self._mask_buffer(len(matchers))
        self._fill(buffer.numpy(), matchers)
        places = np.concatenate([np.arange(first, first + 1 + len(draft)) for first, _, draft in found])
        return Masks(places, self._device.send(buffer).view(torch.uint8))

    def _with_grammar(
        self, rows: npt.NDArray[np.int32], drafts: npt.NDArray[np.int32] | None
    ) -> list[tuple[int, _Row, list[int]]]:
        """First place, row and draft of the rows that have a grammar."""
        if not self._rows:
            return []
        if drafts is None:
            return [
                (place, self._rows[row], []) for place, row in enumerate(rows.tolist()) if row in self._rows
            ]
        found, ends = [], np.flatnonzero(drafts == NO_DRAFT)
        for first, end in zip([0, *(ends[:-1] + 1).tolist()], ends.tolist(), strict=True):
            if (row := self._rows.get(int(rows[first]))) is not None:
                found.append((first, row, drafts[first:end].tolist()))
        return found

    def _mask_buffer(self, count: int) -> torch.Tensor:
        """[count, MASK_WORDS] int32 that a copy may read in the background. Fresh pages for the masks of 64
        rows would cost more than the masks (0.7 ms)."""
        place, size = self._num_filled % _NUM_MASK_BUFFERS, count * MASK_WORDS
        self._num_filled += 1
        if len(self._mask_buffers[place]) < size:
            self._mask_buffers[place] = self._device.host_memory(size + size // 2, torch.int32)
        return self._mask_buffers[place][:size].view(count, MASK_WORDS)

    def _fill(self, words: npt.NDArray[np.int32], matchers: list[LLMatcher | None]) -> None:
        """Every word of ``words``: what an earlier step left there means nothing."""
        work = [(matcher, index) for index, matcher in enumerate(matchers) if matcher is not None]
        for index, matcher in enumerate(matchers):
            if matcher is None:
                words[index] = 0
        stride = words.strides[0]
        if len(work) >= _PARALLEL_FROM:
            if self._executor is None:
                self._executor = LLExecutor()
            self._executor.unsafe_compute_mask_ptr(work, words.ctypes.data, stride, len(words))
        else:
            for matcher, index in work:
                matcher.unsafe_compute_mask_ptr(words.ctypes.data + index * stride, stride)
        for matcher, index in work:
            if matcher.is_error():  # a limit was reached in this state
                words[index] = 0

    def sampled(
        self, rows: npt.NDArray[np.int32], fetch: Fetch, drafts: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Note that a step sampled these rows. ``fetch`` waits for its results, tokens first."""
        for first, row, draft in self._with_grammar(rows, drafts):
            row.unread = (fetch, first, draft)


def _along(matcher: LLMatcher | None, draft: list[int]) -> list[LLMatcher | None]:
    """Return the matcher, and one for the place after each token of the draft.

    None after a token that does not fit: it is not accepted, so neither is what follows.
    """
    found = [matcher]
    for token in draft:
        if matcher is not None:
            matcher = matcher.deep_copy()
            if not matcher.consume_token(token):
                matcher = None
        found.append(matcher)
    return found
