"""The tokens that the engine drew, against the definition of a draw: the largest score wins.

A token's score is its log-probability over the temperature plus noise, a function of seed, position and token
(``kernels/reference/sampling/noise.py``). The engine's own log-probabilities are used, so only the sampler
and what it was told count. The noise itself is checked by how likely the tokens are that it draws.
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

_SLACK = 1e-3  # of scores, by rounding
_SIGMAS = 4.0
_NEVER = frozenset(RESERVED_IDS)


def check_sampling(machine: Machine) -> Found:
    """Raises ``Failed`` for a token that another should have beaten, and ``Skipped`` without draws."""
    recording = machine.recording
    if not recording.draws:
        raise Skipped("the server drew no tokens")
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
        f"{greedy} greedy tokens are the likeliest, and {count} tokens drawn by seed at temperatures"
        f" {', '.join(sigmas)} are those that the noise decides"
    )
    return Found(detail, {"standard_deviations": sigmas})


def _sampleable(position: Position) -> Position:
    """Returns the position without ids that are never sampled. Random weights may make one of them likely."""
    if position.token_ids[0] in _NEVER:
        raise Failed(f"token {position.index} is {position.token_ids[0]}, which is reserved")
    named = zip(position.token_ids, position.logprobs, strict=True)
    ids, logprobs = zip(*(each for each in named if each[0] not in _NEVER), strict=True)
    return Position(position.index, list(ids), list(logprobs))


def _check_greedy(sequence: Sequence) -> int:
    """Returns the number of tokens that were chosen."""
    decoded = [_sampleable(each) for each in sequence.positions if each.index >= sequence.num_prompt]
    for each in decoded:
        if each.logprobs[0] < max(each.logprobs) - _SLACK:
            raise Failed(
                f"{sequence.name}: greedy sampling chose {each.token_ids[0]}, not the likeliest token"
            )
    return len(decoded)


def _check_draw(draw: Draw) -> Iterator[tuple[float, float]]:
    """Yields how much less likely than expected each token is, and the variance of that."""
    positions, count = [_sampleable(each) for each in draw.positions], len(draw.positions)
    indices = np.array([position.index for position in positions])
    keys = torch.from_numpy(row_keys(np.full(count, draw.seed, np.uint64), indices))
    steps = token_steps(1 + max(max(each.token_ids) for each in positions), torch.device("cpu"))
    for place, position in enumerate(positions):
        ids = torch.tensor(position.token_ids)
        scores = torch.tensor(position.logprobs, dtype=torch.float64) / draw.temperature
        noisy = scores + gumbel_noise(keys[place : place + 1], steps[ids])[0]
        # A token that is not among the likeliest is named beside them.
        if noisy[0] < noisy.max() - _SLACK or 0 < draw.top_k < len(ids):
            raise Failed(
                f"at temperature {draw.temperature:g} with top_k {draw.top_k} and seed {draw.seed}, token"
                f" {position.index} is {ids[0]}, which is not the one that the noise decides"
            )
        if draw.top_k == len(ids):  # all tokens that could be drawn are named
            logs = scores.log_softmax(0)
            mean, square = (float((logs.exp() * (-logs) ** power).sum()) for power in (1, 2))
            yield float(-logs[0]) - mean, square - mean**2
