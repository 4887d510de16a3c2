"""Compares log-probabilities: recorded ones with the model on the reference ops in float32, and those of the
demo on the reference ops with ``transformers`` (``scripts/known_answers.py``).

The allowed error of the engine is not a constant: rounding to bfloat16 changes choices between nearly equal
experts, more often in some checkpoints than in others. So the reference runs twice, in float32 and in the
engine's number formats. The engine's error may be somewhat larger than the difference between the two.
Errors are compared for each sequence, and for each kind of position, because faults of attention show early
in a sequence (sinks), from the window's size on, or far into a context.
"""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import torch

from chorale.errors import ChoraleError
from chorale.measure.selfcheck.check import Failed, Found, Skipped
from chorale.measure.selfcheck.device.machine import Machine
from chorale.measure.selfcheck.device.reference import Reference
from chorale.measure.selfcheck.recorded import KNOWN_ANSWERS, Position, Sequence
from chorale.model.demo import ensure_demo
from chorale.model.demo.compare import is_demo

Floats = npt.NDArray[np.float64]

# Limits relative to the error of rounding alone. At a few positions, rounding changes the choice of an expert
# and the error is large. These positions affect means, but not medians.
_MEAN_FACTOR, _MEDIAN_FACTOR, _SEQUENCE_FACTOR = 1.5, 1.4, 3.0
# Added to the limits for rounding that the reference does not simulate: in formats other than float32, then
# for the mean and the median in float32.
_FLOOR, _FLOOR_FLOAT32, _MEDIAN_FLOAT32 = 2e-3, 2e-4, 2e-5
_COARSE = 0.1  # mean error of rounding above which small faults would not show
_ROWS_AT_ONCE = 128  # rows of logits computed at once

# Factors of the embedding. The small one makes squares as small as the norm's epsilon, so that it matters.
SCALES = (1.0, 2.0**-8)
LAST = 60  # compared tokens at the end of each text
# In float32 the answers agree to 1e-5. But the vocabulary's tables are computed when the demo is expanded,
# and may differ in the last bit of bfloat16. In 1 of 1,000 numbers, this adds 0.0004 on average.
_ANSWER_MEAN, _ANSWER_WORST = 0.001, 0.03


def check_logprobs(machine: Machine) -> Found:
    """Raises ``Failed`` naming the kinds of positions that are off, and ``Skipped`` without a recording."""
    sequences = machine.plan.recording.sequences
    if not sequences:
        raise Skipped("the server recorded no log-probabilities")
    if machine.int8:
        raise Skipped("the reference cannot simulate rounding to 8 bits (--cpu-precision)")
    with torch.inference_mode():
        ours, rounded = _errors(machine, sequences)
    facts, faults = _judge(machine, sequences, ours, rounded)
    if faults:
        raise Failed("; ".join(faults[:4]), facts)
    longest = max(len(each.tokens) for each in sequences)
    detail = (
        f"{len(ours)} positions of {len(sequences)} sequences of up to {longest:,} tokens are off by"
        f" {ours.mean():.2g} on average (rounding alone: {rounded.mean():.2g})"
    )
    if rounded.mean() > _COARSE:
        detail += "; rounding errors are so large here that small faults would not show"
    return Found(detail, facts)


def _errors(machine: Machine, sequences: list[Sequence]) -> tuple[Floats, Floats]:
    """Returns the mean absolute errors of each position: the engine's, and those of its rounding alone."""
    references = [Reference(machine)]
    if not machine.is_exact:
        references.append(Reference(machine, rounded=True))
    head, tokens = machine.read("head"), [each.tokens for each in sequences]
    states = [reference.run(tokens) for reference in references]
    ours: list[float] = []
    rounded: list[float] = []
    for number, sequence in enumerate(sequences):
        for begin in range(0, len(sequence.positions), _ROWS_AT_ONCE):
            positions = sequence.positions[begin : begin + _ROWS_AT_ONCE]
            indices = torch.tensor([position.index - 1 for position in positions], device=machine.device)
            exact, *others = (
                reference.logprobs(pieces[number][indices], head)
                for reference, pieces in zip(references, states, strict=True)
            )
            for row, each in enumerate(positions):
                ours.append(_difference(each.logprobs, exact[row], each.token_ids))
                for other in others:
                    named = named_tokens(other[row], each, is_decoded=each.index >= sequence.num_prompt)
                    rounded.append(_difference(other[row, named].tolist(), exact[row], named))
    return np.array(ours), np.array(rounded) if rounded else np.zeros(len(ours))


def _difference(given: list[float], exact: torch.Tensor, token_ids: list[int]) -> float:
    return float(np.abs(np.array(given) - exact[token_ids].double().numpy()).mean())


def named_tokens(logprobs: torch.Tensor, position: Position, *, is_decoded: bool) -> list[int]:
    """Returns the token ids that an engine with these log-probabilities [V] would report for the position.

    Most tokens of a position are recorded because the engine finds them likely, so its errors are larger at
    them than at others. Rounding is therefore measured at the likeliest tokens of the rounded results.
    """
    own, count = position.token_ids[0], len(position.token_ids)
    best: list[int] = logprobs.topk(count).indices.tolist()
    return best if is_decoded else [own, *(token for token in best if token != own)][:count]


def _judge(
    machine: Machine, sequences: list[Sequence], ours: Floats, rounded: Floats
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Returns (numbers by kind of position, a message for each limit that is exceeded)."""
    window, counts = machine.model.sliding_window, [len(each.positions) for each in sequences]
    index = np.array([position.index for each in sequences for position in each.positions])
    kinds = {
        "all": index >= 0,
        "the first 32 positions": index < 32,
        "positions before the window is full": (index >= 32) & (index < window),
        "positions behind the window's first": (window <= index) & (index < 4096),
        "positions from 4,096 on": index >= 4096,
        "decoded positions": index > np.repeat([each.num_prompt for each in sequences], counts),
    }
    floor, median_floor = (_FLOOR_FLOAT32, _MEDIAN_FLOAT32) if machine.is_exact else (_FLOOR, _FLOOR)
    facts: dict[str, dict[str, float]] = {}
    faults: list[str] = []

    def compare(name: str, what: str, found: float, most: float) -> None:
        if not found <= most:
            faults.append(f"{name}: off by {found:.2g} {what}, rounding explains {most:.2g}")

    for name, some in kinds.items():
        if some.any():
            mean, usual, median = ours[some].mean(), rounded[some].mean(), np.median(ours[some])
            facts[name] = {"positions": int(some.sum()), "mean": float(mean), "rounding": float(usual)}
            compare(name, "on average", mean, _MEAN_FACTOR * usual + floor)
            most = _MEDIAN_FACTOR * float(np.median(rounded[some])) + median_floor
            compare(name, "in the median", median, most)
    ends = np.cumsum(counts)[:-1]
    pieces = zip(sequences, np.split(ours, ends), np.split(rounded, ends), strict=True)
    for sequence, own, usual in pieces:
        most = _SEQUENCE_FACTOR * max(np.median(rounded), np.median(usual)) + 5 * median_floor
        compare(sequence.name, "in the median", np.median(own), most)
    return facts, faults


def compute(machine: Machine, texts: list[list[int]], scale: float) -> torch.Tensor:
    """Returns the log-probabilities of the last tokens of each text."""
    reference, head = Reference(machine), machine.read("head")
    found = []
    for x, ids in zip(reference.run(texts, scale), texts, strict=True):
        last = min(LAST, len(ids) - 1)
        chosen = torch.tensor(ids[-last:]).unsqueeze(1)
        found.append(reference.logprobs(x[-last - 1 : -1], head).gather(1, chosen).squeeze(1))
    return torch.cat(found)


def check_answers(machine: Machine) -> Found:
    """Compares the reference with another implementation, always on the demo's weights: those of the given
    checkpoint if it is the demo, else of a copy expanded in the usual folder."""
    if not is_demo(machine.checkpoint, machine.model):
        try:
            machine = machine.of(ensure_demo())
        except (ChoraleError, OSError) as error:
            raise Skipped(f"the demo cannot be expanded: {error}") from None
    stored, worst = json.loads(KNOWN_ANSWERS.read_text("ascii")), 0.0
    for scale, expected in zip(SCALES, stored["logprobs"], strict=True):
        apart = (compute(machine, stored["texts"], scale) - torch.tensor(expected)).abs()
        mean, most = float(apart.mean()), float(apart.max())
        worst = max(worst, most)
        if not (mean <= _ANSWER_MEAN and most <= _ANSWER_WORST):
            limits = f"limits {_ANSWER_MEAN:g} and {_ANSWER_WORST:g}, embeddings times {scale:g}"
            raise Failed(
                f"log-probabilities are off by {mean:.2g} on average and {most:.2g} at most ({limits})"
            )
    count = sum(map(len, stored["logprobs"]))
    return Found(f"{count} log-probabilities equal those of transformers within {worst:.1g}")
