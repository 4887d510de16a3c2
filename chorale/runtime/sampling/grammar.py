"""Grammars of rows: compiled while steps run, one matcher per row, masks filled while the device computes.

A row's mask for step n + 1 needs the token of step n. The worker enqueues the forward pass of n + 1 first (it
finds that token on the device) and then requests masks. Only then, and only if the step has rows with a
grammar, the host waits for the result of step n, advances the matchers, and fills and sends the masks. On a
GPU the host thus fills masks while the device runs the forward pass, with or without async scheduling; rows
without a grammar cost nothing.

A row gets a new matcher with its ``RowStart``, which contains all tokens so far: the matcher of a preempted
sequence is advanced past them. A token that a step in flight sampled goes to the row's old matcher, which is
no longer used.

A row with a draft needs a mask after each draft token. Copies of its matcher consume the draft and are
dropped; the row's matcher consumes the accepted tokens once they are known.
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
from chorale.kernels.ops import Allowed
from chorale.runtime.device import Arrays, Device

CACHE_BYTES = 256 * 1024 * 1024  # room for eight agents with 128 tools of ten described arguments each
# Memory of a grammar in use, estimated from its text: 127 kB for 233 bytes, 367 kB for 1,342, 1,110 kB for
# 5,092 (tests/runtime/sampling/test_grammar_weight.py). Half or more is lexer states, which all copies of a
# matcher share and create when used: 128 tools (103 kB) take 4.8 MiB unused, 7.1 after 16, 17.1 after all.
_ENTRY_BYTES = 96 * 1024
_PER_BYTE = 208
_PARALLEL_FROM = 8  # rows; one thread is faster for fewer
_NUM_MASK_BUFFERS = 4  # steps whose masks are kept; copies of two may still be running
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
        # No admitted request waits for these.
        self._checks = ThreadPoolExecutor(2, thread_name_prefix="grammar-check")

    def warm(self) -> None:
        """Begins to build the tokenizer in a thread; call ``wait_warm`` before the first step.

        The build holds the interpreter's lock for half a second, which would delay running streams later.
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
    """Estimate the bytes of the compiled grammar."""
    return _ENTRY_BYTES + _PER_BYTE * len(grammar)


@dataclass(slots=True)
class _Row:
    """``unread``: the function that fetches the last step's tokens, the row's first sample, and its draft."""

    matcher: LLMatcher | None  # None: the grammar did not compile, or a token did not match
    unread: tuple[Fetch, int, list[int]] | None = None

    def catch_up(self) -> LLMatcher | None:
        """Wait for the row's last step and feed the tokens that the row kept."""
        if self.unread is not None:
            fetch, first, draft = self.unread
            self.unread = None
            tokens = fetch()[0][first : first + 1 + len(draft)].tolist()
            for token, expected in zip(tokens, [*draft, None], strict=True):
                if self.matcher is not None and token >= 0 and not self.matcher.consume_token(token):
                    self.matcher = None
                if token != expected:
                    break
        return self.matcher


def allowed_at(device: Device, samples: npt.NDArray[np.int64], count: int, words: torch.Tensor) -> Allowed:
    """Return what the masks ``words`` [G, MASK_WORDS] int32 allow these G of ``count`` samples."""
    index = np.full(count, -1, np.int32)
    index[samples] = np.arange(len(samples))
    return Allowed(device.upload(index), words.view(torch.uint8))


def allow_all(device: Device, samples: npt.NDArray[np.int64], count: int) -> Allowed:
    """Give these samples masks that allow every token."""
    words = device.upload(np.full((len(samples), MASK_WORDS), -1, np.int32))
    return allowed_at(device, samples, count, words)


class GrammarRows:
    """The matchers of the rows. Only the worker's thread uses them."""

    def __init__(self, device: Device, cache: GrammarCache) -> None:
        self._device, self._cache = device, cache
        self._rows: dict[int, _Row] = {}
        self._executor: LLExecutor | None = None  # made for the first large batch
        self._mask_buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.int32)] * _NUM_MASK_BUFFERS
        self._num_filled = 0

    def start(self, start: RowStart) -> None:
        """Set up a row's matcher and advance it past the sequence's tokens."""
        self._rows.pop(start.row, None)
        sampling = start.sampling
        if not sampling.grammar:
            return
        try:
            matcher: LLMatcher | None = self._cache.matcher(sampling.grammar)
        except ValueError:
            matcher = None  # cannot happen: the grammar was compiled before admission
        known = start.token_ids[start.num_prompt_tokens - sampling.grammar_context :].tolist()
        if matcher is not None and not matcher.consume_tokens(known):
            matcher = None
        self._rows[start.row] = _Row(matcher)

    def allowed(
        self, rows: npt.NDArray[np.int32], drafts: npt.NDArray[np.int32] | None = None
    ) -> Allowed | None:
        """Return the masks of the sampled ``rows`` of a step, or None if none of them has a grammar.

        ``drafts``: as in ``SampleLayout``. A row whose matcher has failed gets an empty mask, and therefore
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
        samples = np.concatenate([np.arange(first, first + 1 + len(draft)) for first, _, draft in found])
        return allowed_at(self._device, samples, len(rows), self._device.send(buffer))

    def _with_grammar(
        self, rows: npt.NDArray[np.int32], drafts: npt.NDArray[np.int32] | None
    ) -> list[tuple[int, _Row, list[int]]]:
        """Return first sample, row and draft of the rows that have a grammar."""
        if not self._rows:
            return []
        if drafts is None:
            return [
                (sample, self._rows[row], []) for sample, row in enumerate(rows.tolist()) if row in self._rows
            ]
        found, ends = [], np.flatnonzero(drafts == NO_DRAFT)
        for first, end in zip([0, *(ends[:-1] + 1).tolist()], ends.tolist(), strict=True):
            if (row := self._rows.get(int(rows[first]))) is not None:
                found.append((first, row, drafts[first:end].tolist()))
        return found

    def _mask_buffer(self, count: int) -> torch.Tensor:
        """Return [count, MASK_WORDS] int32 that a copy may read in the background. Newly allocated pages for
        64 rows would take longer than filling the masks (0.7 ms)."""
        index, size = self._num_filled % _NUM_MASK_BUFFERS, count * MASK_WORDS
        self._num_filled += 1
        if len(self._mask_buffers[index]) < size:
            self._mask_buffers[index] = self._device.host_memory(size + size // 2, torch.int32)
        return self._mask_buffers[index][:size].view(count, MASK_WORDS)

    def _fill(self, words: npt.NDArray[np.int32], matchers: list[LLMatcher | None]) -> None:
        """Overwrite every word of ``words``, which has the masks of an earlier step."""
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
            if matcher.is_error():  # the matcher reached a limit
                words[index] = 0

    def sampled(
        self, rows: npt.NDArray[np.int32], fetch: Fetch, drafts: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Note that a step sampled these rows. ``fetch`` waits for its results, of which tokens come
        first."""
        for first, row, draft in self._with_grammar(rows, drafts):
            row.unread = (fetch, first, draft)


def _along(matcher: LLMatcher | None, draft: list[int]) -> list[LLMatcher | None]:
    """Return the matcher, and a copy advanced past each token of the draft.

    None after a token that does not match: neither it nor the following tokens will be accepted.
    """
    found = [matcher]
    for token in draft:
        if matcher is not None:
            matcher = matcher.deep_copy()
            if not matcher.consume_token(token):
                matcher = None
        found.append(matcher)
    return found
