"""Checks that the engine sampled the token with the largest score.

A token's score is its log-probability divided by the temperature, plus noise that depends on seed, position
and token (``kernels/reference/sampling/noise.py``). The check uses the engine's own log-probabilities, so it
tests only the sampler and its parameters. The likelihood of the sampled tokens tests the noise itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from chorale.kernels.reference.sampling.noise import gumbel_noise, row_keys, token_steps
from chorale.measure.selfcheck.check import Failed, Found, Skipped
from chorale.measure.selfcheck.device.machine import Machine
from chorale.measure.selfcheck.recorded import Draw, Position, Sequence
from chorale.runtime.sampling.sampler import RESERVED_IDS

_SLACK = 1e-3  # tolerance of scores, for rounding
_SIGMAS = 4.0
_NEVER = frozenset(RESERVED_IDS)


def check_sampling(machine: Machine) -> Found:
    """Raises ``Failed`` for a token without the largest score, and ``Skipped`` without sampled tokens."""
    recording = machine.plan.recording
    if not recording.draws:
        raise Skipped("the server sampled no tokens")
    greedy = sum(map(_check_greedy, recording.sequences))
    surprises: dict[float, list[tuple[float, float]]] = {}
    for draw in recording.draws:
        surprises.setdefault(draw.temperature, []).extend(_check_draw(draw))
    sigmas = {
        f"{temperature:g}": sum(off for off, _ in each) / max(sum(v for _, v in each), 1e-9) ** 0.5
        for temperature, each in surprises.items()
    }
    for temperature, off in sigmas.items():
        if abs(off) > _SIGMAS:
            raise Failed(f"draws at temperature {temperature}: {off:.1f} standard deviations too unlikely")
    count = sum(len(draw.positions) for draw in recording.draws)
    detail = (
        f"{greedy} greedy tokens are the likeliest, and {count} tokens sampled by seed at temperatures"
        f" {', '.join(sigmas)} have the largest score"
    )
    return Found(detail, {"standard_deviations": sigmas})


def _sampleable(position: Position) -> Position:
    """Returns the position without reserved ids, which are never sampled but may be likely."""
    if position.token_ids[0] in _NEVER:
        raise Failed(f"token {position.index} is {position.token_ids[0]}, which is reserved")
    named = zip(position.token_ids, position.logprobs, strict=True)
    ids, logprobs = zip(*(each for each in named if each[0] not in _NEVER), strict=True)
    return Position(position.index, list(ids), list(logprobs))


def _check_greedy(sequence: Sequence) -> int:
    """Returns the number of tokens that were sampled greedily."""
    decoded = [_sampleable(each) for each in sequence.positions if each.index >= sequence.num_prompt]
    for each in decoded:
        if each.logprobs[0] < max(each.logprobs) - _SLACK:
            raise Failed(
                f"{sequence.name}: greedy sampling chose {each.token_ids[0]}, not the likeliest token"
            )
    return len(decoded)


def _check_draw(draw: Draw) -> Iterator[tuple[float, float]]:
    """Yields each token's negative log-probability minus its expected value, and its variance."""
    positions, count = [_sampleable(each) for each in draw.positions], len(draw.positions)
    indices = np.array([position.index for position in positions])
    keys = torch.from_numpy(row_keys(np.full(count, draw.seed, np.uint64), indices))
    steps = token_steps(1 + max(max(each.token_ids) for each in positions), torch.device("cpu"))
    for row, position in enumerate(positions):
        ids = torch.tensor(position.token_ids)
        scores = torch.tensor(position.logprobs, dtype=torch.float64) / draw.temperature
        noisy = scores + gumbel_noise(keys[row : row + 1], steps[ids])[0]
        # A sampled token outside the top k is recorded in addition to the k likeliest.
        if noisy[0] < noisy.max() - _SLACK or 0 < draw.top_k < len(ids):
            raise Failed(
                f"at temperature {draw.temperature:g} with top_k {draw.top_k} and seed {draw.seed}, token"
                f" {position.index} is {ids[0]}, which does not have the largest score"
            )
        if draw.top_k == len(ids):  # all tokens that could be sampled are recorded
            logs = scores.log_softmax(0)
            mean, square = (float((logs.exp() * (-logs) ** power).sum()) for power in (1, 2))
            yield float(-logs[0]) - mean, square - mean**2
