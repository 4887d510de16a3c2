"""The log-probabilities of the engine that ran, against the same model in plain float32.

How far an engine may be off is not a constant: rounding to bfloat16 turns choices between nearly equal
experts, more often in some checkpoints than in others. So plain arithmetic runs twice, exactly and with the
roundings of the engine's types, and the engine may be somewhat further from the exact results than that.
Errors are compared by kind of position, because faults of attention show early in a sequence (sinks), from
the window on, or far into a context.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chorale.selfcheck.check import Failed, Found, Skipped
from chorale.selfcheck.device.machine import Machine
from chorale.selfcheck.device.plain import EXACT, Group, Rounding, TooSlow, rms_norm, run_plain
from chorale.selfcheck.recorded import Position, Recording, Sequence

Floats = npt.NDArray[np.float64]

# Of what rounding does. Few positions lie where it turns the choice of an expert, and these are far off: they
# count in means and tails, and medians are of all others.
MEAN_FACTOR, MEDIAN_FACTOR, P99_FACTOR, SEQUENCE_FACTOR = 1.5, 1.4, 3.0, 3.0
_FLOOR_FLOAT32, _FLOOR = 2e-4, 2e-3  # of a mean: what is left where rounding is not simulated
_LONG = 16_384  # tokens from which on only exact arithmetic runs
_LONG_SECONDS = 240.0  # that it may take for such a sequence
_FEW = 200  # positions of a kind, below which its 99th percentile means nothing
_COARSE = 0.1
_ROWS_AT_ONCE = 128  # of logits


def check_logprobs(machine: Machine, recording: Recording) -> Found:
    """Raises ``Failed`` naming the kinds of positions that are off, and ``Skipped`` without a recording."""
    sequences = _that_fit(machine, recording.sequences)
    if not sequences:
        raise Skipped("the server recorded no log-probabilities")
    with torch.inference_mode():
        errors = _errors(machine, sequences)
    if not errors:
        raise Skipped(f"plain arithmetic takes more than {_LONG_SECONDS:.0f} s for each recorded sequence")
    floor = _FLOOR_FLOAT32 if machine.dtype == machine.kv_dtype == torch.float32 else _FLOOR
    kinds = _by_kind(machine, errors)
    faults = _faults(kinds, errors, floor)
    facts: dict[str, Any] = {name: kind.facts for name, kind in kinds.items()}
    every = kinds["all"]
    if faults:
        raise Failed("; ".join(faults), facts)
    too_large, too_slow = len(recording.sequences) - len(sequences), len(sequences) - len(errors)
    more = f"; {too_large} long sequences need more memory than there is" if too_large else ""
    if too_slow:
        more += f"; {too_slow} would take more than {_LONG_SECONDS:.0f} s here and were left out"
    if every.usual > _COARSE:
        more += "; rounding moves so much here that small faults would not show"
    longest = max(len(each.sequence.tokens) for each in errors)
    detail = (
        f"{every.count} positions of {len(errors)} sequences of up to {longest:,} tokens are"
        f" off by {every.ours.mean():.2g} on average (rounding alone: {every.usual:.2g}){more}"
    )
    return Found(detail, facts)


def _that_fit(machine: Machine, sequences: list[Sequence]) -> list[Sequence]:
    if machine.device.type != "cuda":
        return sequences
    config, free = machine.model, torch.cuda.mem_get_info(machine.device)[0]
    width = (
        8 * config.hidden_size
        + 6 * (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    )
    most = int(free * 0.6 / (4 * width))
    return [sequence for sequence in sequences if len(sequence.tokens) <= most]


@dataclass(frozen=True, slots=True)
class _Errors:
    """Mean absolute errors of one sequence's positions. ``rounded``: None if it was not simulated."""

    sequence: Sequence
    ours: Floats
    rounded: Floats | None


def _errors(machine: Machine, sequences: list[Sequence]) -> list[_Errors]:
    short = [each for each in sequences if len(each.tokens) <= _LONG]
    roundings = (EXACT, machine.rounding) if machine.rounding != EXACT else (EXACT,)
    found = _errors_of(machine, short, roundings, math.inf) if short else []
    for each in sequences:
        if each not in short:
            with contextlib.suppress(TooSlow):
                found += _errors_of(machine, [each], (EXACT,), _LONG_SECONDS)
    return found


def _errors_of(
    machine: Machine, sequences: list[Sequence], roundings: tuple[Rounding, ...], seconds: float
) -> list[_Errors]:
    """Raises ``TooSlow`` if they would take longer than ``seconds``."""
    source, head, found = machine.plain, _Head(machine), []
    group = Group([source.embedded(each.tokens) for each in sequences], roundings)
    streams = run_plain(machine.model, source.layers(), group, seconds=seconds)
    pieces = [x.split([len(each.tokens) for each in sequences]) for x in streams]
    for number, sequence in enumerate(sequences):
        found.append(_compare(head, sequence, [x[number] for x in pieces], roundings))
    return found


def _compare(
    head: _Head, sequence: Sequence, states: list[torch.Tensor], roundings: tuple[Rounding, ...]
) -> _Errors:
    """``states``: [T, H] after the last layer, exact and with the other roundings.

    Most tokens of a position are there because the engine holds them to be likely, so its errors are larger
    at them than at others. Rounding is therefore measured at the tokens that the rounded results would name.
    """
    ours: list[float] = []
    rounded: list[float] = []
    for begin in range(0, len(sequence.positions), _ROWS_AT_ONCE):
        positions = sequence.positions[begin : begin + _ROWS_AT_ONCE]
        places = torch.tensor([position.index - 1 for position in positions])
        exact, *others = (
            head.logprobs(x[places.to(x.device)], rounding)
            for x, rounding in zip(states, roundings, strict=True)
        )
        for row, position in enumerate(positions):
            ours.append(_difference(position.logprobs, exact[row], position.token_ids))
            for other in others:
                named = _named(other[row], position, is_decoded=position.index >= sequence.num_prompt)
                rounded.append(_difference(other[row, named].tolist(), exact[row], named))
    return _Errors(sequence, np.array(ours), np.array(rounded) if len(roundings) > 1 else None)


def _difference(given: list[float], exact: torch.Tensor, token_ids: list[int]) -> float:
    return float(np.abs(np.array(given) - exact[token_ids].double().numpy()).mean())


def _named(logprobs: torch.Tensor, position: Position, *, is_decoded: bool) -> list[int]:
    """Token ids that an engine with these log-probabilities [V] would give for the position."""
    own, count = position.token_ids[0], len(position.token_ids)
    best: list[int] = logprobs.topk(count).indices.tolist()
    return best if is_decoded else [own, *(token for token in best if token != own)][:count]


class _Head:
    """The output matrix, read once, and its log-probabilities."""

    def __init__(self, machine: Machine) -> None:
        self._norm = machine.plain.read(None, "final_norm").float()
        self._weight = machine.plain.read(None, "head")
        self._eps = machine.model.rms_norm_eps
        self._rounds_logits = machine.ops.name == "reference"  # other back ends keep float32 sums

    def logprobs(self, x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        """x [R, H] -> [R, V], on the CPU."""
        normed = rounding.product(rms_norm(x, self._norm, self._eps))
        logits = torch.cat([normed @ part.float().t() for part in self._weight.split(16384)], 1)
        if self._rounds_logits:
            logits = rounding.product(logits)
        return (logits - logits.double().logsumexp(-1, keepdim=True).float()).cpu()


@dataclass(frozen=True, slots=True)
class _Kind:
    """Errors of all positions of one kind."""

    ours: Floats
    rounded: Floats  # of those positions for which it was simulated
    usual: float  # mean error by rounding: of this kind, or of all if it was not simulated

    @property
    def count(self) -> int:
        return len(self.ours)

    @property
    def facts(self) -> dict[str, float]:
        found = {
            name: float(np.quantile(self.ours, share)) for name, share in (("median", 0.5), ("p99", 0.99))
        }
        return {"positions": self.count, "mean": float(self.ours.mean()), **found, "rounding": self.usual}


def _by_kind(machine: Machine, errors: list[_Errors]) -> dict[str, _Kind]:
    window = machine.model.sliding_window
    kinds: dict[str, Callable[[Sequence, Position], bool]] = {
        "all": lambda s, p: True,
        "the first 32 positions": lambda s, p: p.index < 32,
        "positions before the window is full": lambda s, p: 32 <= p.index < window,
        "positions behind the window's first": lambda s, p: window <= p.index < 4096,
        "positions from 4,096 on": lambda s, p: p.index >= 4096,
        "decoded positions": lambda s, p: p.index > s.num_prompt,
    }
    every = np.concatenate([each.rounded for each in errors if each.rounded is not None] or [np.zeros(1)])
    found: dict[str, _Kind] = {}
    for name, holds in kinds.items():
        ours, rounded = [], []
        for each in errors:
            is_in = np.array([holds(each.sequence, position) for position in each.sequence.positions], bool)
            ours.append(each.ours[is_in])
            if each.rounded is not None:
                rounded.append(each.rounded[is_in])
        joined = np.concatenate(rounded) if rounded else np.zeros(0)
        if sum(map(len, ours)):
            usual = float(joined.mean()) if len(joined) else float(every.mean())
            found[name] = _Kind(np.concatenate(ours), joined if len(joined) else every, usual)
    return found


def _faults(kinds: dict[str, _Kind], errors: list[_Errors], floor: float) -> list[str]:
    faults = []
    every = kinds["all"].rounded
    for name, kind in kinds.items():
        tail = P99_FACTOR * max(_quantile(kind.rounded, 0.99), _quantile(every, 0.99)) + 10 * floor
        for what, found, most in (
            ("on average", float(kind.ours.mean()), MEAN_FACTOR * kind.usual + floor),
            (
                "at half of them",
                _quantile(kind.ours, 0.5),
                MEDIAN_FACTOR * _quantile(kind.rounded, 0.5) + floor,
            ),
            ("at 1 of 100", _quantile(kind.ours, 0.99) if kind.count >= _FEW else 0.0, tail),
        ):
            if not found <= most:
                faults.append(f"{name}: off by {found:.2g} {what}, rounding explains {most:.2g}")
                break
    for each in errors:
        if len(each.ours):
            own = every if each.rounded is None else each.rounded
            most = SEQUENCE_FACTOR * max(_quantile(every, 0.5), _quantile(own, 0.5)) + 5 * floor
            found = _quantile(each.ours, 0.5)
            if not found <= most:
                faults.append(
                    f"{each.sequence.name}: off by {found:.2g} at half of it, rounding explains {most:.2g}"
                )
    return faults[:4]


def _quantile(errors: Floats, share: float) -> float:
    return float(np.quantile(errors, share))


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))
