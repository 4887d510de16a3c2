"""Measures the gain of shared noise by the target's certainty: python -m training.head.coupling --head FILE.

At each position of held-out answers the target draws a token and the head drafts it, once. Where the target
is nearly certain, a drawn draft is at best as good as the most likely token, with or without shared noise;
elsewhere only shared noise makes two draws agree. A higher temperature moves positions from the first kind to
the second.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from chorale.model.demo import ARCHIVE
from training.corpus import sample
from training.evaluate import EVALUATED
from training.head.evaluate import OTHER_SEED, noise_of
from training.head.export import read_head
from training.head.net import Chain, HeadNet, Sources
from training.head.target import Target, joined
from training.restore import restore

FIRST_SEED = 79_500_000
BOUNDS = (0.5, 0.9, 0.99, 1.01)  # upper bounds of the probability of the target's most likely token
WAYS = ("coupled", "half the noise", "uncoupled", "greedy")
TEMPERATURES = (1.0, 1.5, 2.0)


def logits_of(
    target: Target, net: HeadNet, cases: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields for each answer positions [N], the target's logits [N, V] there, and the head's [N, Vd]."""
    device = target.embedding.device
    for family in EVALUATED:
        for seed in range(cases):
            ids, learned = sample(FIRST_SEED + seed, "eval", family).tokens()
            token_ids = torch.from_numpy(np.asarray(ids, np.int64)).to(device).unsqueeze(0)
            marks = torch.from_numpy(np.asarray(learned, bool)).to(device)
            anchors = (marks[1:-1] & marks[2:]).nonzero().T
            if not anchors.numel():
                continue
            positions = torch.arange(token_ids.shape[1], device=device).unsqueeze(0)
            states = target.states(token_ids, positions)
            embedded = F.embedding(token_ids.roll(-1, 1), target.embedding)
            matrices = net.matrices()
            given = Sources(joined(states, net.shape.boundaries), embedded, positions)
            drafted = net.logits(Chain(net, matrices, given, anchors).x, matrices)[0]
            final = target.final(states[-1])[0, anchors[0] + 1]
            yield anchors[0] + 2, (final @ target.unembedding.mT).float(), drafted


@torch.no_grad()
def measure(target: Target, net: HeadNet, cases: int) -> dict[tuple[float, float], torch.Tensor]:
    """Returns (temperature, bound) -> number of positions, and of drafts that agree: coupled, coupled with
    half of the noise, uncoupled, greedy."""
    found: dict[tuple[float, float], torch.Tensor] = defaultdict(lambda: torch.zeros(5))
    for seed, (positions, theirs, own) in enumerate(logits_of(target, net, cases)):
        seeds = np.full(len(positions), seed)
        noise = noise_of(seeds, positions, None)
        others = noise_of(seeds + OTHER_SEED, positions, net.draft_ids)
        for temperature in TEMPERATURES:
            drawn = (theirs / temperature + noise).argmax(-1)
            shared = noise[:, net.draft_ids]
            heated = own / temperature
            drafts = (heated + shared, heated + shared / 2, heated + others, own)
            agreed = torch.stack([net.draft_ids[scores.argmax(-1)] == drawn for scores in drafts])
            sure = (theirs / temperature).softmax(-1).amax(-1)
            for bound, inside in zip(BOUNDS, masks(sure), strict=True):
                row = torch.cat((inside.sum().view(1), (agreed & inside).sum(1)))
                found[temperature, bound] += row.cpu()
    return found


def masks(sure: torch.Tensor) -> list[torch.Tensor]:
    """Returns for each bound the mask of the probabilities between the previous bound and this one."""
    return [(low <= sure) & (sure < high) for low, high in zip((0.0, *BOUNDS), BOUNDS, strict=False)]


def markdown(found: dict[tuple[float, float], torch.Tensor]) -> str:
    columns = ("temperature", "the target's largest probability", "positions", *WAYS)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (temperature, bound), row in found.items():
        count, *agreed = row.tolist()
        cells = " | ".join(f"{one / max(count, 1):.1%}" for one in agreed)
        lines.append(f"| {temperature:g} | below {min(bound, 1):g} | {count:.0f} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--archive", type=Path, default=ARCHIVE, help="the target")
    parser.add_argument("--cases", type=int, default=5, help="conversations a family")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    target = Target(restore(options.archive).to(options.device))
    print(markdown(measure(target, read_head(options.head, target.unembedding), options.cases)))


if __name__ == "__main__":
    main()
