"""Log-probabilities in the forms of Chat Completions (objects) and of Completions (parallel lists)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chorale.engine.types import SamplingSpec, TokenLogprobs
from chorale.harmony.vocab import Vocabulary

LEAST = -9999.0  # JSON has no -inf; OpenAI sends this value instead


def is_scored(sampling: SamplingSpec) -> bool:
    """Returns whether the response has log-probabilities or routed experts, which are slow to encode."""
    scores = sampling.logprobs, sampling.prompt_logprobs, sampling.routed_experts_start
    return any(score is not None for score in scores)


class LogprobsWriter:
    """Writes log-probabilities. ``as_ids``: tokens as ``token_id:123`` (return_tokens_as_token_ids).

    ``named``: the candidates are those of ``logprob_token_ids``: all are returned, and the token itself.
    """

    __slots__ = ("_as_ids", "_named", "vocab")

    def __init__(self, vocab: Vocabulary, as_ids: bool = False, named: bool = False) -> None:
        self.vocab = vocab
        self._as_ids = as_ids
        self._named = named

    def token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.vocab.decode([token_id])

    # -------------------------------------------------------------- chat

    def chat(self, logprobs: Iterable[TokenLogprobs], num_top: int) -> dict[str, Any]:
        """Returns the ``logprobs`` object of a choice or a delta."""
        return {"content": [self._chat_entry(entry, num_top) for entry in logprobs], "refusal": None}

    def _chat_entry(self, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
        top = self._candidates(entry, num_top)
        if self._named and entry.token_id not in entry.top_ids:
            top.insert(0, (entry.token_id, entry.logprob))
        return {
            **self._chat_token(entry.token_id, entry.logprob),
            "top_logprobs": [self._chat_token(token_id, logprob) for token_id, logprob in top],
        }

    def _candidates(self, entry: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
        end = None if self._named else num_top
        return list(zip(entry.top_ids[:end], entry.top_logprobs[:end], strict=True))

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.token(token_id),
            "logprob": max(logprob, LEAST),
            "bytes": list(self.vocab.token_bytes(token_id)),
        }

    # -------------------------------------------------------------- completions

    def completion(
        self, entries: Sequence[tuple[int, TokenLogprobs | None, int]], num_top: int
    ) -> dict[str, Any]:
        """Returns parallel lists. ``entries``: (token id, log-probabilities or None, offset of its text)."""
        return {
            "text_offset": [offset for _, _, offset in entries],
            "tokens": [self.token(token_id) for token_id, _, _ in entries],
            "token_logprobs": [None if e is None else max(e.logprob, LEAST) for _, e, _ in entries],
            "top_logprobs": [None if e is None else self._top(e, num_top) for _, e, _ in entries],
        }

    def _top(self, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        """Returns log-probabilities of the alternatives and the token by text, the highest of equal texts."""
        top: dict[str, float] = {}
        for token_id, logprob in [*self._candidates(entry, num_top), (entry.token_id, entry.logprob)]:
            text = self.token(token_id)
            top[text] = max(logprob, LEAST, top.get(text, LEAST))
        return top

    # -------------------------------------------------------------- prompt (vLLM's form)

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """Returns ``{token id: {logprob, rank, decoded_token}}`` per prompt token, None for the first."""
        return [None if entry is None else self._prompt_entry(entry) for entry in entries]

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked = [
            (token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(
                zip(entry.top_ids, entry.top_logprobs, strict=True), start=1
            )
        ]
        return {
            str(token_id): {
                "logprob": max(logprob, LEAST),
                "rank": rank,
                "decoded_token": self.vocab.decode([token_id]),
            }
            for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
        }
