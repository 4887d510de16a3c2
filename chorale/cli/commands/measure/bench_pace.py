"""``chorale bench serve``'s options for request rate and goodput, as in vLLM."""

from __future__ import annotations

import argparse
import math

from chorale.errors import ConfigError
from chorale.measure.bench.load import Pace

GOALS = ("ttft", "tpot", "e2el")


def add_pace(made: argparse.ArgumentParser) -> None:
    pace = made.add_argument_group("request rate")
    pace.add_argument("--request-rate", type=float, default=math.inf, help="requests per second")
    pace.add_argument(
        "--burstiness", type=float, default=1.0, help="1: Poisson arrivals; lower values: burstier"
    )
    pace.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), help="change the rate over the run"
    )
    pace.add_argument("--ramp-up-start-rps", type=float, metavar="X", help="requests per second at the start")
    pace.add_argument("--ramp-up-end-rps", type=float, metavar="X", help="requests per second at the end")
    pace.add_argument("--max-concurrency", type=int, help="maximum number of concurrent requests")
    pace.add_argument(
        "--num-warmups", type=int, default=0, help="requests to send before the measurement, not counted"
    )
    pace.add_argument(
        "--client-processes", type=int, help="client processes (default: one per 256 concurrent requests)"
    )


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
