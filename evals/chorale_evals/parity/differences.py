"""Differences between two recordings of the same texts, token by token.

Position j of a text is its token number j, from 0; the model predicted it from the j tokens before it. The
first token of a text is predicted from nothing and has no score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chorale.errors import ConfigError
from chorale_evals.parity.recording import Reading, Recording, Scores
from chorale_evals.parity.texts import Text

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which the continuations at temperature 0 differ.

    ``margin_a``: by how many nats A prefers its own token to B's; ``margin_b``: by how many B prefers its own
    to A's. A margin is a lower bound (``at_least``) if the server does not list the other's token.
    """

    place: int
    token_a: int
    token_b: int
    margin_a: float
    margin_b: float
    at_least: bool

    @property
    def size(self) -> float:
        """Returns the sum of both margins in nats: how far the servers disagree about the two tokens."""
        return self.margin_a + self.margin_b


@dataclass(frozen=True, slots=True)
class Pair:
    """The differences of one text, B minus A, in nats; NaN where a value is missing."""

    text: Text
    delta: Floats  # [n] tokens of the text, each server alone
    noise_a: Floats  # [n] A in a crowd minus A alone
    noise_b: Floats
    decode: Floats  # common prefix of the continuations
    decode_noise_a: Floats  # A's continuation as a prompt minus token by token
    decode_noise_b: Floats
    kl: Floats  # [n] lower bound of the KL divergence from A's candidates to B's
    same_first: Floats  # [n] 1 if both have the same likeliest token, else 0
    overlap: Floats  # [n] fraction of A's candidates that B lists too
    divergence: Divergence | None
    num_greedy: int  # number of compared tokens of the continuations, including the first that differs


def compare(a: Recording, b: Recording) -> list[Pair]:
    """Returns the differences of each text. Raises ``ConfigError`` if the texts are not the same."""
    if [one.text for one in a.readings] != [one.text for one in b.readings]:
        raise ConfigError(f"{a.name} and {b.name} hold different texts: record both with the same options")
    return [_pair(one, other) for one, other in zip(a.readings, b.readings, strict=True)]


def _pair(a: Reading, b: Reading) -> Pair:
    length = a.text.length
    common = _common(a.greedy, b.greedy)
    kl, same_first, overlap = _candidates(a.alone, b.alone)
    return Pair(
        text=a.text,
        delta=_less(b.alone.token, a.alone.token),
        noise_a=_less(a.again.token[:length], a.alone.token),
        noise_b=_less(b.again.token[:length], b.alone.token),
        decode=_less(b.greedy_scores.token[:common], a.greedy_scores.token[:common]),
        decode_noise_a=_continued(a),
        decode_noise_b=_continued(b),
        kl=kl,
        same_first=same_first,
        overlap=overlap,
        divergence=_divergence(a, b, common),
        num_greedy=min(common + 1, len(a.greedy), len(b.greedy)),
    )


def _less(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> Floats:
    return one.astype(np.float64) - other.astype(np.float64)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    shortest = min(len(one), len(other))
    return next((place for place in range(shortest) if one[place] != other[place]), shortest)


def _continued(one: Reading) -> Floats:
    """Returns a server's scores of its own continuation, as a prompt minus token by token."""
    common = _common(one.greedy, one.continuation)
    scored = one.again.token[one.text.length : one.text.length + common]
    return _less(scored, one.greedy_scores.token[: len(scored)])


def _candidates(a: Scores, b: Scores) -> tuple[Floats, Floats, Floats]:
    """Returns (KL, whether the likeliest tokens agree, overlap) for each position.

    KL is computed over the candidates that both servers list and one class of all other tokens; merging
    tokens into a class never increases it, so the true value is at least this.
    """
    missing = np.where((a.top_ids[:, 0] >= 0) & (b.top_ids[:, 0] >= 0), 0.0, np.nan)
    equal = (a.top_ids[:, :, None] == b.top_ids[:, None, :]) & (a.top_ids[:, :, None] >= 0)  # [n, k, k]
    listed = equal.any(axis=2)
    other = np.where(listed, np.take_along_axis(b.top, equal.argmax(axis=2), axis=1), -np.inf).astype(float)
    p = np.where(listed, np.exp(np.nan_to_num(a.top.astype(float), nan=-np.inf)), 0.0)
    q = np.where(listed, np.exp(other), 0.0)
    rest_p, rest_q = (np.maximum(1.0 - one.sum(axis=1), 1e-7) for one in (p, q))
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, p * (a.top.astype(float) - other), 0.0)
    kl = np.nansum(terms, axis=1) + rest_p * np.log(rest_p / rest_q)
    same = (a.top_ids[:, 0] == b.top_ids[:, 0]).astype(float)
    share = listed.sum(axis=1) / np.maximum((a.top_ids >= 0).sum(axis=1), 1)
    return np.maximum(kl, 0.0) + missing, same + missing, share + missing


def _divergence(a: Reading, b: Reading, common: int) -> Divergence | None:
    if common >= min(len(a.greedy), len(b.greedy)):
        return None
    mine, theirs = a.greedy[common], b.greedy[common]
    margin_a, sure_a = _margin(a.greedy_scores, common, theirs)
    margin_b, sure_b = _margin(b.greedy_scores, common, mine)
    return Divergence(common, mine, theirs, margin_a, margin_b, not (sure_a and sure_b))


def _margin(scores: Scores, index: int, other: int) -> tuple[float, bool]:
    """Returns (margin of the chosen token over ``other`` in nats, whether it is exact)."""
    own, ids = float(scores.token[index]), scores.top_ids[index]
    found = np.flatnonzero(ids == other)
    if len(found):
        return own - float(scores.top[index][found[0]]), True
    listed = scores.top[index][np.isfinite(scores.top[index])]
    return (own - float(listed.min()) if len(listed) else 0.0), False
