"""Scorer: asks a server for the log-probabilities of given tokens, over POST /v1/completions.

Two forms are known. vLLM's ``prompt_logprobs`` with token ids (Chorale and vLLM), and OpenAI's ``echo``
with ``logprobs``. Prompts are token ids in both, so the servers' tokenizers need not agree about any text.
A response is decoded straight into typed values and then kept as arrays: 128k tokens with 5 candidates are
60 MB of JSON.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec
import numpy as np

from chorale.errors import ChoraleError
from chorale_evals.parity.recording import Scores

NEEDED = (
    "parity needs /v1/completions with token ids as prompt, and either prompt_logprobs (vLLM's form) or echo "
    "with logprobs (OpenAI's)"
)
_BUSY = (429, 502, 503)
_ATTEMPTS = 6
_PREFIX = "token_id:"


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Lists(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Lists | None = None
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Answer:
    """``prompt``: the scores of the prompt's tokens. ``greedy``: the continuation; () if it has no ids."""

    prompt: Scores
    greedy: tuple[int, ...]
    greedy_scores: Scores


@dataclass(slots=True)
class Scorer:
    """``where`` names the server in messages."""

    client: httpx2.Client
    model: str
    where: str
    top_k: int
    sleep: Callable[[float], None] = time.sleep
    _echo: bool = field(default=False, init=False)  # the server knows only OpenAI's form

    @property
    def form(self) -> str:
        return "echo" if self._echo else "prompt_logprobs"

    def longest(self) -> int | None:
        """Returns the longest sequence that the server takes, if it says so."""
        try:
            response = self.client.get("/models")
            data = msgspec.json.decode(response.content, type=_Models).data
        except (httpx2.HTTPError, msgspec.MsgspecError):
            return None
        return data[0].max_model_len if data else None

    def score(self, token_ids: Sequence[int], num_tokens: int) -> Answer:
        """Scores a prompt and continues it by ``num_tokens`` at temperature 0.

        Raises ``ChoraleError`` if the server refuses the request or says less than is needed.
        """
        if not self._echo:
            answer, why = self._by_ids(token_ids, num_tokens)
            if answer is not None:
                return answer
            self._echo = True
        else:
            why = ""
        return self._by_echo(token_ids, num_tokens, why)

    def _by_ids(self, token_ids: Sequence[int], num_tokens: int) -> tuple[Answer | None, str]:
        body = self._body(token_ids, num_tokens) | {"prompt_logprobs": self.top_k, "ignore_eos": True}
        response = self._post(body)
        if response.status_code in (400, 422):
            return None, _message(response)
        choice = self._choice(response)
        if choice.prompt_logprobs is None:
            return None, "it accepts prompt_logprobs and returns none"
        self._check_count(len(choice.prompt_logprobs), len(token_ids))
        continued = _of_lists(choice.logprobs, self.top_k)
        greedy = _ids(choice.logprobs)
        return Answer(_of_entries(choice.prompt_logprobs, token_ids, self.top_k), greedy, continued), ""

    def _by_echo(self, token_ids: Sequence[int], num_tokens: int, why: str) -> Answer:
        response = self._post(self._body(token_ids, num_tokens) | {"echo": True})
        if response.status_code != 200:
            raise ChoraleError(self._refusal(why, f"for echo: {_message(response)}"))
        lists = self._choice(response).logprobs
        if lists is None or len(lists.tokens) < len(token_ids):
            raise ChoraleError(self._refusal(why, "echo with logprobs does not return the prompt's"))
        split = len(token_ids)
        prompt = _Lists(
            lists.tokens[:split], lists.token_logprobs[:split], (lists.top_logprobs or [])[:split]
        )
        rest = _Lists(lists.tokens[split:], lists.token_logprobs[split:], (lists.top_logprobs or [])[split:])
        return Answer(_of_lists(prompt, self.top_k), _ids(rest), _of_lists(rest, self.top_k))

    def _refusal(self, why: str, then: str) -> str:
        reasons = "; ".join(filter(None, (f"for prompt_logprobs: {why}" if why else "", then)))
        return f"{self.where}: {NEEDED}. It responded {reasons}"

    def _body(self, token_ids: Sequence[int], num_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(token_ids),
            "max_tokens": max(1, num_tokens),
            "temperature": 0,
            "logprobs": self.top_k,
            "return_tokens_as_token_ids": True,
        }

    def _post(self, body: dict[str, Any]) -> httpx2.Response:
        """Waits and asks again while the server is too busy."""
        for attempt in range(_ATTEMPTS):
            try:
                response = self.client.post("/completions", json=body)
            except httpx2.HTTPError as error:
                raise ChoraleError(
                    f"no answer from {self.where} ({error or type(error).__name__})"
                ) from error
            if response.status_code not in _BUSY or attempt == _ATTEMPTS - 1:
                return response
            self.sleep(min(2.0**attempt, 10.0))
        raise AssertionError("unreachable")

    def _choice(self, response: httpx2.Response) -> _Choice:
        if response.status_code != 200:
            raise ChoraleError(f"{self.where}: {_message(response)}")
        try:
            return msgspec.json.decode(response.content, type=_Completion).choices[0]
        except (msgspec.MsgspecError, IndexError) as error:
            raise ChoraleError(f"{self.where}: not a completion with log-probabilities ({error})") from None

    def _check_count(self, found: int, wanted: int) -> None:
        if found != wanted:
            raise ChoraleError(f"{self.where}: {found} log-probabilities for a prompt of {wanted} tokens")


def _message(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:200].strip()}"


def empty(length: int, top_k: int) -> Scores:
    return Scores(
        np.full(length, np.nan, np.float32),
        np.full((length, top_k), np.nan, np.float32),
        np.full((length, top_k), -1, np.int64),
    )


def _of_entries(
    entries: Sequence[Mapping[str, _Entry] | None], token_ids: Sequence[int], top_k: int
) -> Scores:
    scores = empty(len(entries), top_k)
    for place, (entry, token) in enumerate(zip(entries, token_ids, strict=True)):
        if entry is None:
            continue
        if (own := entry.get(str(token))) is not None:
            scores.token[place] = own.logprob
        _fill(scores, place, {int(name): one.logprob for name, one in entry.items()})
    return scores


def _of_lists(lists: _Lists | None, top_k: int) -> Scores:
    if lists is None:
        return empty(0, top_k)
    scores = empty(len(lists.tokens), top_k)
    for place, own in enumerate(lists.token_logprobs):
        scores.token[place] = np.nan if own is None else own
    for place, top in enumerate(lists.top_logprobs or ()):
        if top is not None:
            _fill(scores, place, {_key(name): value for name, value in top.items()})
    return scores


def _fill(scores: Scores, place: int, candidates: Mapping[int, float]) -> None:
    """Writes the best candidates; of equally likely ones the lowest id is first, on every server."""
    best = sorted(candidates.items(), key=lambda item: (-item[1], item[0]))[: scores.top.shape[1]]
    for rank, (token, value) in enumerate(best):
        scores.top_ids[place, rank], scores.top[place, rank] = token, value


def _key(name: str) -> int:
    """Returns the id in ``token_id:123``; for other strings a number above all ids, by their hash."""
    if name.startswith(_PREFIX):
        return int(name[len(_PREFIX) :])
    return 2**30 + zlib.crc32(name.encode()) % 2**29


def _ids(lists: _Lists | None) -> tuple[int, ...]:
    if lists is None or not all(name.startswith(_PREFIX) for name in lists.tokens):
        return ()
    return tuple(int(name[len(_PREFIX) :]) for name in lists.tokens)
