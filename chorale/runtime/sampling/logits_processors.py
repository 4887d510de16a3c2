"""LogitsProcessors: changes of one row's logits before temperature, and their device state.

Exists only for rows that need it: biases, allowed ids, bad words, penalties, min_tokens with many stop ids.
The tokens of such a row are also kept on the device (``history``), because a step may be sampled before the
host has read the previous result. The host always knows the lengths, so nothing here waits for the device.

A draft is written into the history before its step is sampled (``foresee``), so that each sample sees the
draft tokens before it as output. ``record`` then overwrites them with the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chorale.engine.types import EARLY_STOPS, RowStart, SamplingSpec

FIRST_ROOM = 256  # initial room of the history after the prompt, tokens


@dataclass(frozen=True, slots=True)
class BadWords:
    """Words of one length: ``prefixes`` [W, length - 1], ``last`` [W]."""

    prefixes: torch.Tensor
    last: torch.Tensor

    def apply(self, logits: torch.Tensor, output: torch.Tensor) -> None:
        """Forbid the last token of each word whose earlier tokens end ``output`` [num_output]."""
        num_prefix = self.prefixes.shape[1]
        if num_prefix > output.shape[0]:
            return
        matched = (self.prefixes == output[output.shape[0] - num_prefix :]).all(dim=1)
        penalty = torch.zeros(len(matched), device=logits.device).masked_fill_(matched, float("-inf"))
        logits.index_add_(0, self.last, penalty)  # adds, because two words may have the same last token


class LogitsProcessors:
    """One row's history, counts and constraints. Built from its ``RowStart``."""

    __slots__ = (
        "_allowed", "_bad_words", "_bias_ids", "_bias_values", "_counts", "_foreseen", "_frequency",
        "_history", "_limit", "_min_tokens", "_num_prompt", "_presence", "_repetition", "_stop_ids",
    )  # fmt: skip

    def __init__(self, start: RowStart, vocab_size: int, max_len: int, device: torch.device) -> None:
        spec = start.sampling
        self._num_prompt = start.num_prompt_tokens
        self._min_tokens = spec.min_tokens
        self._stop_ids = _known(start.eos_token_ids, vocab_size, device)
        self._presence = spec.presence_penalty
        self._frequency = spec.frequency_penalty
        self._repetition = spec.repetition_penalty
        bias = {token: value for token, value in spec.logit_bias.items() if 0 <= token < vocab_size}
        self._bias_ids = _known(tuple(bias), vocab_size, device)
        self._bias_values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._allowed = (
            None if spec.allowed_token_ids is None else _known(spec.allowed_token_ids, vocab_size, device)
        )
        self._bad_words = _bad_words(spec, vocab_size, device)
        limit = max_len if spec.max_tokens is None else self._num_prompt + max(1, spec.max_tokens)
        self._limit = min(limit, max_len) + 1
        known = torch.from_numpy(start.token_ids.astype("int64")).to(device)
        self._history = _longer(known, len(known) + FIRST_ROOM, self._limit)
        self._foreseen: int | None = None  # position where a draft starts in the history, not in the counts
        self._counts: torch.Tensor | None = None  # [V] float32, how often each token is in the output
        if self._presence or self._frequency:
            output = known[self._num_prompt :]
            self._counts = torch.zeros(vocab_size, device=device)
            self._counts.index_add_(0, output, torch.ones(len(output), device=device))

    @staticmethod
    def needed(start: RowStart) -> bool:
        spec = start.sampling
        return bool(
            spec.logit_bias
            or spec.allowed_token_ids is not None
            or spec.bad_words
            or (spec.min_tokens > 0 and len(start.eos_token_ids) > EARLY_STOPS)
            or spec.presence_penalty
            or spec.frequency_penalty
            or spec.repetition_penalty != 1.0
        )

    def apply(self, logits: torch.Tensor, num_tokens: int) -> None:
        """Change ``logits`` [V] in place, for the token at position ``num_tokens``.

        Order: logit_bias, allowed_token_ids, bad_words, min_tokens, penalties.
        """
        if len(self._bias_ids):
            logits.index_add_(0, self._bias_ids, self._bias_values)
        if self._allowed is not None:
            allowed = logits[self._allowed]
            logits.fill_(float("-inf")).index_copy_(0, self._allowed, allowed)
        output = self._history[self._num_prompt : num_tokens]
        for words in self._bad_words:
            words.apply(logits, output)
        if num_tokens - self._num_prompt < self._min_tokens:
            logits.index_fill_(0, self._stop_ids, float("-inf"))
        self._apply_penalties(logits, num_tokens)

    def _apply_penalties(self, logits: torch.Tensor, num_tokens: int) -> None:
        """Apply penalties as vLLM does: repetition over prompt and output, then frequency and presence over
        output.

        Works on the tokens seen, not on the vocabulary. A token seen twice gets the same value twice.
        """
        if self._repetition == 1.0 and self._counts is None:
            return
        seen = self._history[:num_tokens]
        drafted = seen[num_tokens:] if self._foreseen is None else seen[self._foreseen :]
        values = logits[seen]
        if self._repetition != 1.0:
            values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        if self._counts is not None:
            counts = self._counts[seen]
            if len(drafted):
                counts = counts + (seen.unsqueeze(1) == drafted).sum(1)
            values = values - self._frequency * counts - self._presence * counts.clamp(max=1.0)
        logits.index_copy_(0, seen, values)

    def foresee(self, token_id: torch.Tensor, position: int) -> None:
        """Write a draft token [1] int64 at ``position``, where later samples see it."""
        self._write(token_id, position)
        if self._foreseen is None:
            self._foreseen = position

    def record(self, token_id: torch.Tensor, position: int, is_kept: torch.Tensor | None = None) -> None:
        """Record the token [1] int64 that was sampled at ``position``.

        ``is_kept`` [1] bool: whether the row keeps it. If not, a later step overwrites it unread.
        """
        self._write(token_id, position)
        self._foreseen = None
        if self._counts is not None:
            one = torch.ones(1, device=self._counts.device) if is_kept is None else is_kept.float()
            self._counts.index_add_(0, token_id, one)

    def _write(self, token_id: torch.Tensor, position: int) -> None:
        if position >= len(self._history):
            self._history = _longer(self._history, 2 * position + 1, self._limit)
        self._history[position : position + 1] = token_id


def _longer(history: torch.Tensor, wanted: int, limit: int) -> torch.Tensor:
    """Extend a history with zeros. It grows with its sequence, because a thousand rows of maximum length
    would take a gigabyte that ``memory.py`` does not count."""
    return F.pad(history, (0, max(0, min(wanted, limit) - len(history))))


def _known(token_ids: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return [n] int64: the distinct ids that are in the vocabulary."""
    found = dict.fromkeys(token for token in token_ids if 0 <= token < vocab_size)
    return torch.tensor(list(found), dtype=torch.int64, device=device)


def _bad_words(spec: SamplingSpec, vocab_size: int, device: torch.device) -> tuple[BadWords, ...]:
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for word in spec.bad_words:
        if word and all(0 <= token < vocab_size for token in word):
            by_length.setdefault(len(word), []).append(word)
    groups = []
    for words in by_length.values():
        table = torch.tensor(words, dtype=torch.int64, device=device)
        groups.append(BadWords(table[:, :-1].contiguous(), table[:, -1]))
    return tuple(groups)
