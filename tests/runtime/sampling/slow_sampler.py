"""The sampler's specification, slow and obvious: Python integers and float64, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chorale.engine.types import SamplingSpec

Scores = npt.NDArray[np.float64]
M32, M64 = 2**32 - 1, 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def _finish(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def noise(seed: int, position: int, token: int) -> float:
    key = _finish((_finish((seed + GOLDEN) & M64) + (position + 1) * GOLDEN) & M64)
    a, b = key & M32, key >> 32
    x = (token * 0x9E3779B9 + a) & M32
    x ^= x >> 16
    x = (x * 0x21F0AAAD) & M32
    x ^= b
    x ^= x >> 15
    x = (x * 0x735A2D97) & M32
    x ^= x >> 15
    v = min(float(np.float32(x >> 1)) * 2**-31 + 2**-32, 1 - 2**-24)
    return -math.log(-math.log1p(-v))


@dataclass(frozen=True)
class Case:
    spec: SamplingSpec
    prompt: Sequence[int]
    output: Sequence[int]
    eos: Sequence[int]
    seed: int
    forbidden: Sequence[int] = ()


def processed(logits: Scores, case: Case) -> Scores:
    """Masks, biases, bad words, min_tokens, penalties."""
    spec, scores = case.spec, logits.astype(np.float64).copy()
    scores[list(case.forbidden)] = -np.inf
    for token, bias in spec.logit_bias.items():
        scores[token] += bias
    for token in range(len(scores)):
        if spec.allowed_token_ids is not None and token not in spec.allowed_token_ids:
            scores[token] = -np.inf
    for word in spec.bad_words:
        *start, last = word
        if len(start) <= len(case.output) and list(case.output)[len(case.output) - len(start) :] == start:
            scores[last] = -np.inf
    if len(case.output) < spec.min_tokens:
        scores[list(case.eos)] = -np.inf
    for token in range(len(scores)):
        count = list(case.output).count(token)
        if count or token in case.prompt:
            positive = scores[token] > 0
            scores[token] *= 1 / spec.repetition_penalty if positive else spec.repetition_penalty
        scores[token] -= spec.frequency_penalty * count + spec.presence_penalty * (count > 0)
    return scores


def probabilities(logits: Scores, case: Case) -> tuple[Scores, float]:
    """What is sampled from, and how near the nearest token is to being kept or removed otherwise."""
    spec, margin = case.spec, math.inf
    scores = processed(logits, case)
    if spec.temperature == 0:
        best = np.sort(scores)[::-1]
        return (np.arange(len(scores)) == scores.argmax()).astype(float), float(best[0] - best[1])
    scores = scores / spec.temperature
    p = np.exp(scores - scores.max())
    order = np.argsort(-p, kind="stable")
    if spec.min_p > 0:
        margin = min(margin, float(np.abs(p / p.max() - spec.min_p).min()))
        p[p < spec.min_p * p.max()] = 0
    if 0 < spec.top_k < len(p):
        last, next_ = scores[order[spec.top_k - 1]], scores[order[spec.top_k]]
        if np.isfinite(next_):
            margin = min(margin, float(last - next_))
        p[order[spec.top_k :]] = 0
    if spec.top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(p[order])])[:-1] / p.sum()
        margin = min(margin, float(np.abs(before[1:] - spec.top_p).min()))
        p[order[before >= spec.top_p]] = 0
    return p / p.sum(), margin


def sample(logits: Scores, case: Case) -> tuple[int, float]:
    """(token, how decided: a small number means that rounding may choose otherwise)."""
    p, margin = probabilities(logits, case)
    position = len(case.prompt) + len(case.output)
    with np.errstate(divide="ignore"):
        scores = np.log(p)
    if case.spec.temperature > 0:
        scores += [noise(case.seed, position, token) for token in range(len(p))]
    ranked = np.sort(scores)[::-1]
    return int(scores.argmax()), min(margin, float(ranked[0] - ranked[1]))
