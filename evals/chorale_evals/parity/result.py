"""The result of a comparison: JSON for programs, a table for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from chorale.harmony.vocab import VOCAB_SIZE, load_vocabulary
from chorale_evals.parity.differences import Pair
from chorale_evals.parity.groups import WITHIN, Group
from chorale_evals.parity.recording import Recording
from chorale_evals.parity.tally import Tally
from chorale_evals.parity.verdict import BOUNDS, LARGEST, TITLES, Expected, Judgement
from chorale_evals.statistics import Estimate, number


def to_json(
    a: Recording, b: Recording, pairs: Sequence[Pair], judgement: Judgement, expected: Expected
) -> dict[str, Any]:
    return {
        "verdict": judgement.verdict,
        "title": TITLES[judgement.verdict],
        "precision": judgement.precision,
        "expected": expected,
        "as_expected": judgement.meets(expected),
        "reasons": list(judgement.reasons),
        "a": a.about,
        "b": b.about,
        "bounds": {"times_noise": WITHIN, "mean_nats": BOUNDS, "times_mean": LARGEST},
        "mean_size": asdict(judgement.size),
        "direction": asdict(judgement.direction),
        "candidates": {name: one and asdict(one) for name, one in candidates(pairs).items()},
        "groups": [_group_to_json(group) for group in judgement.groups],
        "onset": judgement.onset,
        "steps": [asdict(step) for step in judgement.steps],
        "continuations": {
            "texts": len(pairs),
            "tokens": sum(pair.num_greedy for pair in pairs),
            "no_tie_above": judgement.large_divergence,
            "divergences": [
                {"text": name, "string_a": shown(one.token_a), "string_b": shown(one.token_b), **asdict(one)}
                for name, one in judgement.divergences
            ],
        },
        "texts": [_pair_to_json(pair) for pair in pairs],
    }


def candidates(pairs: Sequence[Pair]) -> dict[str, Estimate | None]:
    """Returns each comparison of candidates as a mean over tokens, None without data."""
    found: dict[str, Estimate | None] = {}
    for name in ("kl", "same_first", "overlap"):
        tally = Tally.of([getattr(pair, name) for pair in pairs])
        found[name] = tally.mean_difference() if tally.num_texts else None
    return found


def _group_to_json(group: Group) -> dict[str, Any]:
    tally, names = group.tally, ("p50", "p90", "p99")
    mean, size = tally.means()[0].tolist()
    return {
        "name": group.name, "tokens": tally.num_tokens, "mean": mean, "mean_size": size,
        **dict(zip(names, tally.quantiles()[0].tolist(), strict=True)),
        "worst": tally.worst,
        "noise": dict(zip(names, group.noise.tolist(), strict=True)),
        "ratio": asdict(group.ratio),
    }  # fmt: skip


def _pair_to_json(pair: Pair) -> dict[str, Any]:
    sizes = np.abs(pair.delta)
    known = bool(np.isfinite(sizes).any())
    return {
        "name": pair.text.name, "kind": pair.text.kind, "length": pair.text.length,
        "mean": float(np.nanmean(pair.delta)) if known else None,
        "mean_size": float(np.nanmean(sizes)) if known else None,
        "worst": float(np.nanmax(sizes)) if known else None,
        "worst_position": int(np.nanargmax(sizes)) if known else None,
    }  # fmt: skip


def shown(token: int) -> str:
    return repr(load_vocabulary().decode([token])) if 0 <= token < VOCAB_SIZE else f"token {token}"


def table(
    a: Recording, b: Recording, pairs: Sequence[Pair], judgement: Judgement, expected: Expected
) -> Iterator[str]:
    """Yields the lines of the report as text."""
    yield f"A  {_about(a)}"
    yield f"B  {_about(b)}"
    tokens = sum(pair.text.length for pair in pairs)
    yield f"{len(pairs)} texts, {tokens:,} tokens"
    mean = float(np.nanmean(np.concatenate([one.alone.token for one in a.readings])))
    guess = -math.log(VOCAB_SIZE)
    if mean < guess:
        yield f"A's weights are not trained: the texts have {mean:.1f} nats a token, a guess {guess:.1f}."
        yield "Rounding alone may look like a different model then; compare trained weights."
    yield ""
    yield f"{'|difference| of log-probabilities, in nats':>69}    {'times the noise of A':>26}"
    yield f"{'tokens':>37}{'median':>9}{'mean':>9}{'p99':>9}{'worst':>9}{'(95 % interval)':>30}"
    for group in judgement.groups:
        yield _row(group)
    yield ""
    yield from _summary(pairs, judgement)
    yield ""
    met = "as expected"
    if not judgement.meets(expected):
        met = f"expected: {TITLES['equal'] if expected == 'equal' else f'at most the size of {expected}'}"
    yield f"Verdict: {TITLES[judgement.verdict]} ({met})"
    for reason in judgement.reasons:
        yield f"  {reason}"
    if judgement.verdict == "inconclusive":
        yield "  More texts decide it: repeat with a larger --texts."


def _about(recording: Recording) -> str:
    about = recording.about
    parts = [str(about.get(name)) for name in ("model", "version", "recorded") if about.get(name)]
    return f"{recording.name}" + (f"  ({', '.join(parts)})" if parts else "")


def _row(group: Group) -> str:
    tally, ratio = group.tally, group.ratio
    median, _, nearly_all = tally.quantiles()[0].tolist()
    values = (median, group.mean, nearly_all, tally.worst)
    mark = " *" if ratio.low > WITHIN else " ?" if ratio.value > WITHIN else ""
    return (
        f"{group.name:<29}{tally.num_tokens:>8}"
        + "".join(f"{number(v):>9}" for v in values)
        + f"{ratio!s:>30}{mark}"
    )


def _summary(pairs: Sequence[Pair], judgement: Judgement) -> Iterator[str]:
    mean = judgement.direction.mean
    interval = f"99 % interval {mean.low:+.2g} to {mean.high:+.2g}"
    yield f"mean difference B - A     {mean.value:+.2g} nats ({interval})"
    found = candidates(pairs)
    if (kl := found["kl"]) is not None:
        yield f"KL of the candidates      {number(kl.value)} nats a token (to {number(kl.high)})"
    same, overlap = found["same_first"], found["overlap"]
    if same is not None and overlap is not None:
        yield f"same likeliest token      {same.value:.2%} ({same.low:.2%} to {same.high:.2%})"
        yield f"candidates in common      {overlap.value:.2%}"
    parted = judgement.divergences
    tokens = sum(pair.num_greedy for pair in pairs)
    equal = f"{len(pairs) - len(parted)} of {len(pairs)} equal"
    yield f"continuations             {equal} ({tokens} tokens at temperature 0)"
    for name, one in sorted(parted, key=lambda item: -item[1].size)[:5]:
        tie = "a tie" if one.size <= judgement.large_divergence else "no tie"
        least = "at least " if one.at_least else ""
        yield (
            f"  {name}: after {one.place} tokens A {shown(one.token_a)}, B {shown(one.token_b)}; "
            f"margins {least}{number(one.margin_a)} and {number(one.margin_b)} nats ({tie})"
        )
