"""Synthetic recordings: log-probabilities with noise of a known size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from chorale_evals.parity.recording import Reading, Recording, Scores
from chorale_evals.parity.texts import Text

Floats = npt.NDArray[np.float32]
Fault = Callable[[npt.NDArray[np.float64], np.random.Generator], npt.NDArray[np.float64]]
LENGTH, TEXTS, GREEDY, TOP = 640, 10, 32, 3


def truth(number: int) -> npt.NDArray[np.float64]:
    """Returns the exact log-probabilities of a text."""
    return -np.random.default_rng(1000 + number).exponential(3.0, LENGTH + GREEDY)


def noise_like(scale: float, size: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Returns heavy-tailed noise, as from rounding: tokens differ in how much they amplify it."""
    return scale * rng.standard_normal(size) * rng.lognormal(0.0, 0.7, size)


def scores(values: npt.NDArray[np.float64]) -> Scores:
    token = values.astype(np.float32)
    token[0] = np.nan
    ids = np.tile(np.arange(TOP), (len(token), 1))
    return Scores(token, token[:, None] - np.arange(TOP, dtype=np.float32), ids)


def recording(
    name: str, seed: int, noise: float, fault: Fault | None = None, share: float = 1.0
) -> Recording:
    """``share``: fraction of the tokens that are rounded differently in a crowd than alone."""
    readings = []
    for number in range(TEXTS):
        rng = np.random.default_rng((seed, number))
        exact = truth(number)
        if fault is not None:
            exact = exact + fault(exact, rng)
        alone = exact + noise_like(noise, len(exact), rng)
        redrawn = exact + noise_like(noise, len(exact), rng)
        again = np.where(rng.random(len(exact)) < share, redrawn, alone)
        greedy = tuple(range(GREEDY))
        continued = scores(np.concatenate(([0.0], alone[LENGTH:])))
        readings.append(
            Reading(
                Text(f"text-{number}", "prose", LENGTH, tuple(range(LENGTH))),
                scores(alone[:LENGTH]),
                greedy,
                Scores(continued.token[1:], continued.top[1:], continued.top_ids[1:]),
                greedy,
                scores(again),
            )
        )
    return Recording(tuple(readings), TOP, {"where": name})


def parted(one: Recording, place: int, margin: float) -> Recording:
    """Returns ``one`` with another token at ``place`` of the first continuation, ``margin`` nats ahead."""
    first = one.readings[0]
    greedy = (*first.greedy[:place], 1, *first.greedy[place + 1 :])
    top = first.greedy_scores.top.copy()
    ids = first.greedy_scores.top_ids.copy()
    ids[place] = (1, first.greedy[place], 2)
    top[place] = first.greedy_scores.token[place] + np.array((0.0, -margin, -20.0))
    changed = replace(first, greedy=greedy, greedy_scores=replace(first.greedy_scores, top=top, top_ids=ids))
    return replace(one, readings=(changed, *one.readings[1:]))
