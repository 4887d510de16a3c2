"""``chorale bench serve``'s request rate and goodput, as in vLLM."""

from __future__ import annotations

import argparse
import math

from chorale.errors import ConfigError
from chorale.measure.bench.load import Pace

GOALS = ("ttft", "tpot", "e2el")


def pace_of(given: argparse.Namespace) -> Pace:
    """Returns the arrival schedule that the options describe. Raises ``ConfigError`` for a contradiction."""
    if not (given.request_rate > 0 and given.burstiness > 0):  # also false for nan
        raise ConfigError("--request-rate and --burstiness must be above 0")
    first, last = given.ramp_up_start_rps, given.ramp_up_end_rps
    if given.ramp_up_strategy is None:
        if first is not None or last is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return Pace(given.request_rate, given.burstiness, given.max_concurrency, given.seed)
    if given.request_rate != math.inf:
        raise ConfigError("--ramp-up-strategy and --request-rate cannot be combined")
    if first is None or last is None or not 0 < first <= last < math.inf:
        raise ConfigError(
            "--ramp-up-strategy needs --ramp-up-start-rps above 0 and --ramp-up-end-rps at least as high"
        )
    return Pace(first, given.burstiness, given.max_concurrency, given.seed, given.ramp_up_strategy, last)


def ramp_words(pace: Pace) -> str:
    return (
        f"Traffic ramp-up strategy: {pace.ramp}. Will increase RPS from {pace.rate:g} to {pace.last_rate:g} "
        "over the duration of the benchmark."
    )


def goals_of(texts: list[str]) -> dict[str, float]:
    """Parses ``ttft:200`` ... into milliseconds by metric. Raises ``ConfigError``."""
    found = {}
    for text in texts:
        name, _, most = text.partition(":")
        try:
            found[name] = float(most)
        except ValueError:
            found[name] = math.nan
        if name not in GOALS or not found[name] >= 0:
            raise ConfigError(
                f"--goodput {text!r}: must be NAME:MILLISECONDS, where NAME is one of {', '.join(GOALS)}"
            )
    return found
