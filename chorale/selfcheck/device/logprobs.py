"""The log-probabilities of the engine that ran, against the same model on the reference ops in float32.

How far an engine may be off is not a constant: rounding to bfloat16 turns choices between nearly equal
experts, more often in some checkpoints than in others. So the reference runs twice, exactly and in the
engine's number formats, and the engine may be somewhat further from the exact results than that. Errors are
compared by kind of position, because faults of attention show early in a sequence (sinks), from the window
on, or far into a context; and for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chorale.selfcheck.check import Failed, Found, Skipped
from chorale.selfcheck.device.machine import Machine
from chorale.selfcheck.device.reference import Reference
from chorale.selfcheck.recorded import Position, Recording, Sequence

Floats = npt.NDArray[np.float64]

# Of what rounding does. Few positions lie where it turns the choice of an expert, and these are far off: they
# count in means, and medians are of all others.
_MEAN_FACTOR, _MEDIAN_FACTOR, _SEQUENCE_FACTOR = 1.5, 1.4, 3.0
# What is left where rounding is not simulated, in other formats than float32 and in it: a choice between
# experts may turn there, too, and moves no median.
_FLOOR, _FLOOR_FLOAT32, _MEDIAN_FLOAT32 = 2e-3, 2e-4, 2e-5
_COARSE = 0.1
_ROWS_AT_ONCE = 128  # of logits


@dataclass(frozen=True, slots=True)
class _Errors:
    """Mean absolute errors of one sequence's positions. ``rounded``: those of rounding alone; empty if the
    engine computes in float32."""

    sequence: Sequence
    ours: Floats
    rounded: Floats


def check_logprobs(machine: Machine, recording: Recording) -> Found:
    """Raises ``Failed`` naming the kinds of positions that are off, and ``Skipped`` without a recording."""
    if not recording.sequences:
        raise Skipped("the server recorded no log-probabilities")
    with torch.inference_mode():
        errors = _errors(machine, recording.sequences)
    facts, faults = _judge(machine, errors)
    if faults:
        raise Failed("; ".join(faults[:4]), facts)
    every = facts["all"]
    longest = max(len(each.sequence.tokens) for each in errors)
    detail = (
        f"{every['positions']} positions of {len(errors)} sequences of up to {longest:,} tokens are"
        f" off by {every['mean']:.2g} on average (rounding alone: {every['rounding']:.2g})"
    )
    if every["rounding"] > _COARSE:
        detail += "; rounding moves so much here that small faults would not show"
    return Found(detail, facts)


def _errors(machine: Machine, sequences: list[Sequence]) -> list[_Errors]:
    references = [Reference(machine)]
    if not machine.is_exact:
        references.append(Reference(machine, rounded=True))
    lengths, head = [len(each.tokens) for each in sequences], machine.read("head")
    x = references[0].embedded([token for each in sequences for token in each.tokens])
    states = [reference.run(x, lengths).split(lengths) for reference in references]
    found = []
    for number, sequence in enumerate(sequences):
        ours: list[float] = []
        rounded: list[float] = []
        for begin in range(0, len(sequence.positions), _ROWS_AT_ONCE):
            positions = sequence.positions[begin : begin + _ROWS_AT_ONCE]
            places = torch.tensor([position.index - 1 for position in positions], device=x.device)
            exact, *others = (
                reference.logprobs(pieces[number][places], head)
                for reference, pieces in zip(references, states, strict=True)
            )
            for row, each in enumerate(positions):
                ours.append(_difference(each.logprobs, exact[row], each.token_ids))
                for other in others:
                    named = named_tokens(other[row], each, is_decoded=each.index >= sequence.num_prompt)
                    rounded.append(_difference(other[row, named].tolist(), exact[row], named))
        found.append(_Errors(sequence, np.array(ours), np.array(rounded)))
    return found


def _difference(given: list[float], exact: torch.Tensor, token_ids: list[int]) -> float:
    return float(np.abs(np.array(given) - exact[token_ids].double().numpy()).mean())


def named_tokens(logprobs: torch.Tensor, position: Position, *, is_decoded: bool) -> list[int]:
    """Token ids that an engine with these log-probabilities [V] would give for the position.

    Most tokens of a position are there because the engine holds them to be likely, so its errors are larger
    at them than at others. Rounding is therefore measured at the tokens that the rounded results would name.
    """
    own, count = position.token_ids[0], len(position.token_ids)
    best: list[int] = logprobs.topk(count).indices.tolist()
    return best if is_decoded else [own, *(token for token in best if token != own)][:count]


def _judge(machine: Machine, errors: list[_Errors]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """(numbers of each kind of position, what is wrong)."""
    window = machine.model.sliding_window
    kinds: dict[str, Callable[[Sequence, Position], bool]] = {
        "all": lambda s, p: True,
        "the first 32 positions": lambda s, p: p.index < 32,
        "positions before the window is full": lambda s, p: 32 <= p.index < window,
        "positions behind the window's first": lambda s, p: window <= p.index < 4096,
        "positions from 4,096 on": lambda s, p: p.index >= 4096,
        "decoded positions": lambda s, p: p.index > s.num_prompt,
    }
    floor, median_floor = (_FLOOR_FLOAT32, _MEDIAN_FLOAT32) if machine.is_exact else (_FLOOR, _FLOOR)
    facts: dict[str, dict[str, float]] = {}
    faults: list[str] = []

    def compare(name: str, what: str, found: float, most: float) -> None:
        if not found <= most:
            faults.append(f"{name}: off by {found:.2g} {what}, rounding explains {most:.2g}")

    for name, holds in kinds.items():
        own, rounded = _of_kind(errors, holds)
        if not len(own):
            continue
        usual = float(rounded.mean())
        facts[name] = {"positions": len(own), "mean": float(own.mean()), "rounding": usual}
        compare(name, "on average", float(own.mean()), _MEAN_FACTOR * usual + floor)
        compare(name, "at half of them", _half(own), _MEDIAN_FACTOR * _half(rounded) + median_floor)
    every = _half(_of_kind(errors, kinds["all"])[1])
    for each in errors:
        usual = max(every, _half(each.rounded))
        compare(each.sequence.name, "at half", _half(each.ours), _SEQUENCE_FACTOR * usual + 5 * median_floor)
    return facts, faults


def _of_kind(errors: list[_Errors], holds: Callable[[Sequence, Position], bool]) -> tuple[Floats, Floats]:
    """(the engine's errors, those of rounding alone)."""
    is_in = np.array(
        [holds(each.sequence, position) for each in errors for position in each.sequence.positions]
    )
    ours, rounded = (np.concatenate([getattr(each, name) for each in errors]) for name in ("ours", "rounded"))
    return ours[is_in], rounded[is_in] if len(rounded) else np.zeros(1)


def _half(errors: Floats) -> float:
    return float(np.median(errors)) if len(errors) else 0.0
