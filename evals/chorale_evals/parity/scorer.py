"""Scorer: asks a server for the log-probabilities of given tokens, over POST /v1/completions.

Requests use vLLM's ``prompt_logprobs``, which Chorale supports too. Prompts are token ids, so tokenizers play
no role. Answers are kept as arrays, because 128k tokens with 5 candidates are 60 MB of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chorale.errors import ChoraleError
from chorale.requests.openai_client import AsyncClient, error_text
from chorale_evals.parity.recording import Scores

NEEDED = "parity needs /v1/completions with token ids as prompt, and prompt_logprobs (Chorale, vLLM)"
_PREFIX = "token_id:"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request. ``prompt``: scores of the prompt. ``greedy``: tokens of the continuation."""

    prompt: Scores
    greedy: tuple[int, ...]
    greedy_scores: Scores


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores token sequences with one server. ``where``: name of the server in messages."""

    client: AsyncClient
    model: str
    where: str
    top_k: int

    async def longest(self) -> int | None:
        """Returns the server's longest sequence in tokens, or None if it does not say."""
        entries = await self.client.models()
        longest = entries[0].get("max_model_len") if entries else None
        return longest if isinstance(longest, int) else None

    async def score(self, token_ids: Sequence[int], num_tokens: int) -> Answer:
        """Scores a prompt and continues it by ``num_tokens`` at temperature 0.

        Raises ``ChoraleError`` if the server refuses the request or the answer lacks log-probabilities.
        """
        body = {
            "model": self.model,
            "prompt": list(token_ids),
            "max_tokens": max(1, num_tokens),
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": self.top_k,
            "prompt_logprobs": self.top_k,
            "return_tokens_as_token_ids": True,
        }
        response = await self.client.post("completions", body)
        if response.status_code != 200:
            needed = f" ({NEEDED})" if response.status_code in (400, 422) else ""
            raise ChoraleError(f"{self.where}: {error_text(response)}{needed}")
        try:
            choice = response.json()["choices"][0]
            prompt = [_by_id(one, "logprob") for one in choice["prompt_logprobs"]]
            top = [_by_id(one) for one in choice["logprobs"]["top_logprobs"]]
            greedy = tuple(int(name.removeprefix(_PREFIX)) for name in choice["logprobs"]["tokens"])
            if len(prompt) != len(token_ids):
                raise ValueError(f"{len(prompt)} for a prompt of {len(token_ids)} tokens")
            own = [one.get(token) for one, token in zip(prompt, token_ids, strict=True)]
            chosen = choice["logprobs"]["token_logprobs"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            found = f"not a completion with log-probabilities ({type(error).__name__}: {error})"
            raise ChoraleError(f"{self.where}: {found}: {NEEDED}") from None
        return Answer(_scores(own, prompt, self.top_k), greedy, _scores(chosen, top, self.top_k))


def _by_id(named: Mapping[str, Any] | None, field: str = "") -> dict[int, float]:
    """Returns the log-probabilities of a token's candidates by their ids."""
    entries = (named or {}).items()
    return {int(name.removeprefix(_PREFIX)): value[field] if field else value for name, value in entries}


def _scores(own: Sequence[float | None], candidates: Sequence[Mapping[int, float]], top_k: int) -> Scores:
    """Sorts candidates. Ties are sorted by id, so that their order is the same for every server."""
    token = np.array([np.nan if value is None else value for value in own], np.float32)
    top = np.full((len(own), top_k), np.nan, np.float32)
    ids = np.full((len(own), top_k), -1, np.int64)
    for index, named in enumerate(candidates):
        best = sorted(named.items(), key=lambda item: (-item[1], item[0]))[:top_k]
        for rank, (name, value) in enumerate(best):
            ids[index, rank], top[index, rank] = name, value
    return Scores(token, top, ids)
