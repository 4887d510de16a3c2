"""Measures how many drafts of a head are accepted: ``python -m training.head.evaluate --head FILE --out
build/acceptance``.

The demo answers held-out conversations, sampled with the noise of
``chorale.kernels.reference.sampling.noise`` as in the server. Then the head drafts from every token of these
answers at once, and each answer is divided into the steps of an engine: a step keeps the drafts up to the
first that differs from the answer, and one more token. *Acceptance length* is the mean number of tokens of a
step. Three ways to draft at temperature 1: ``coupled`` (the most likely token after adding the noise with
which the target draws that position), ``uncoupled`` (the same with noise of another seed) and ``greedy``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from chorale.harmony.vocab import VOCAB_SIZE
from chorale.kernels.reference.sampling.noise import gumbel_noise, row_keys, token_steps
from chorale.model.demo import ARCHIVE
from training.corpus import sample
from training.evaluate import EVALUATED, make_case
from training.generate import PAD, Generator
from training.head.net import Chain, HeadNet, Sources
from training.head.target import Target, joined

MOST = 5  # drafts per step
MAX_NEW = 200
FIRST_SEED = 78_000_000
OTHER_SEED = 2**40  # added to a row's seed for noise other than the target's
WAYS = {0.0: ("greedy",), 1.0: ("coupled", "uncoupled", "greedy")}


class NoisyGenerator(Generator):
    """Draws row ``r`` with the noise of (``first_seed + r``, position, token)."""

    first_seed = 0

    def noise(self, logits: torch.Tensor, positions: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        return noise_of(self.first_seed + np.arange(len(logits)), positions, None)


def noise_of(seeds: np.ndarray[Any, Any], positions: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Returns [N, V] Gumbel noise, for the tokens ``ids`` if given."""
    keys = row_keys(seeds.astype(np.uint64), positions.cpu().numpy().astype(np.int64))
    steps = token_steps(VOCAB_SIZE, positions.device)
    return gumbel_noise(torch.from_numpy(keys).to(positions.device), steps if ids is None else steps[ids])


@dataclass(frozen=True, slots=True)
class Answer:
    """``ids``: prompt and answer; ``start``: where the answer begins; ``seed``: the seed of its noise."""

    task: str
    ids: list[int]
    start: int
    seed: int


def answers(net: Generator, num_cases: int, temperature: float, batch: int) -> Iterator[list[Answer]]:
    """Returns the first round of ``num_cases`` held-out conversations per family, batched by length."""
    cases = [
        (family.__module__.rsplit(".", 1)[-1], make_case(sample(FIRST_SEED + index, "eval", family)).ids)
        for family in EVALUATED
        for index in range(num_cases)
    ]
    cases.sort(key=lambda case: len(case[1]))
    for first in range(0, len(cases), batch):
        part = cases[first : first + batch]
        if isinstance(net, NoisyGenerator):
            net.first_seed = first
        made = net.generate([ids for _, ids in part], MAX_NEW, temperature)
        yield [
            Answer(task, ids + new, len(ids), first + row)
            for row, ((task, ids), new) in enumerate(zip(part, made, strict=True))
        ]


@torch.no_grad()
def matches(
    target: Target, net: HeadNet, group: Sequence[Answer], temperature: float, way: str
) -> list[torch.Tensor]:
    """Returns for each answer [tokens - 2, MOST] bool: which drafts after each of its tokens equal the
    following tokens."""
    device = target.embedding.device
    width = max(len(one.ids) for one in group)
    token_ids = torch.tensor([one.ids + [PAD] * (width - len(one.ids)) for one in group], device=device)
    positions = torch.arange(width, device=device).expand(len(group), -1)
    states = target.states(token_ids, positions)
    embedded = F.embedding(token_ids.roll(-1, 1), target.embedding)
    counts = [max(len(one.ids) - one.start - 2, 0) for one in group]
    starts = torch.tensor([one.start - 1 for one in group], device=device).unsqueeze(1)
    anchors = (starts + torch.arange(max(*counts, 1), device=device)).clamp(max=width - 1)
    sources = Sources(joined(states, net.shape.boundaries), embedded, positions)
    matrices = net.matrices()
    chain = Chain(net, matrices, sources, anchors)
    seeds = np.repeat(
        [one.seed + (OTHER_SEED if way == "uncoupled" else 0) for one in group], anchors.shape[1]
    )
    found = []
    for step in range(MOST):
        scores = net.logits(chain.x, matrices).flatten(0, 1)
        at = anchors + 2 + step
        if way != "greedy":
            scores = scores / temperature + noise_of(seeds, at.flatten(), net.draft_ids)
        drafts = net.draft_ids[scores.argmax(-1)].view(anchors.shape)
        found.append(matches_of(drafts, token_ids, anchors, step))
        chain.advance(F.embedding(drafts, target.embedding))
    table = torch.stack(found, dim=-1)
    return [_inside(table[row, :count]).cpu() for row, count in enumerate(counts)]


def matches_of(
    drafts: torch.Tensor, token_ids: torch.Tensor, anchors: torch.Tensor, step: int
) -> torch.Tensor:
    """Returns whether drafts [B, A] of a step (0: the first) equal the rows' tokens; False after the end."""
    padded = F.pad(token_ids, (0, step + 2), value=-1)
    return drafts == padded.gather(1, anchors + 2 + step)


def _inside(table: torch.Tensor) -> torch.Tensor:
    """Excludes drafts after the answer's end, which cannot be accepted."""
    left = torch.arange(len(table), 0, -1, device=table.device).unsqueeze(1)
    return table & (torch.arange(table.shape[1], device=table.device) < left)


@dataclass(slots=True)
class Tally:
    """Steps, tokens, and the steps that kept at least 1, 2, ... drafts, for one number of drafts per step."""

    steps: int = 0
    tokens: int = 0
    kept: list[int] = field(default_factory=lambda: [0] * MOST)

    def walk(self, table: torch.Tensor, most: int) -> None:
        """``table``: one answer's of ``matches``. Counts its steps; the first token is known."""
        runs = table[:, :most].int().cumprod(1).sum(1).tolist()
        at = 0
        while at < len(runs) + 1:
            accepted = runs[at] if at < len(runs) else 0
            for position in range(accepted):
                self.kept[position] += 1
            self.steps, self.tokens = self.steps + 1, self.tokens + accepted + 1
            at += accepted + 1

    def table(self) -> dict[str, Any]:
        steps = max(self.steps, 1)
        shares = [round(kept / steps, 3) for kept in self.kept]
        return {"length": round(self.tokens / steps, 3), "steps": self.steps, "positions": shares}


def measure(target: Target, net: HeadNet, num_cases: int, batch: int = 32) -> dict[str, Any]:
    """Returns (temperature, way) -> task -> number of drafts -> length, steps, shares by position."""
    generator = NoisyGenerator(target.net)
    tallies: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: [Tally() for _ in range(MOST)]))
    for temperature, ways in WAYS.items():
        for group in answers(generator, num_cases, temperature, batch):
            for way in ways:
                for answer, table in zip(group, matches(target, net, group, temperature, way), strict=True):
                    if len(answer.ids) - answer.start < 2:
                        continue  # the answer ends before the first step
                    for task in (answer.task, "all"):
                        for most, tally in enumerate(tallies[f"temperature {temperature:g}, {way}"][task], 1):
                            tally.walk(table, most)
    return {
        run: {
            task: {str(most): one.table() for most, one in enumerate(found, 1)}
            for task, found in tasks.items()
        }
        for run, tasks in tallies.items()
    }


def markdown(runs: dict[str, Any]) -> str:
    """Returns two tables: by number of drafts over all tasks, and by task for three drafts."""
    lines = ["| acceptance length | " + " | ".join(f"K = {most}" for most in range(1, MOST + 1)) + " |"]
    lines.append("|---" * (MOST + 1) + "|")
    for run, tasks in runs.items():
        cells = [f"{tasks['all'][str(most)]['length']:.2f}" for most in range(1, MOST + 1)]
        lines.append(f"| {run} | {' | '.join(cells)} |")
    lines += ["", "| kept at K = 5 | " + " | ".join(f"draft {one}" for one in range(1, MOST + 1)) + " |"]
    lines.append("|---" * (MOST + 1) + "|")
    for run, tasks in runs.items():
        shares = tasks["all"][str(MOST)]["positions"]
        lines.append(f"| {run} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    lines += ["", "| K = 3 | " + " | ".join(runs) + " |", "|---" * (len(runs) + 1) + "|"]
    for task in sorted(next(iter(runs.values()))):
        cells = [f"{tasks[task]['3']['length']:.2f}" if task in tasks else "" for tasks in runs.values()]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def evaluate(target: Target, net: HeadNet, num_cases: int, folder: Path) -> dict[str, Any]:
    """Prints and writes ``acceptance.json`` and ``acceptance.md``."""
    started = time.perf_counter()
    runs = measure(target, net, num_cases)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "acceptance.json").write_text(json.dumps(runs))
    (folder / "acceptance.md").write_text(markdown(runs) + "\n")
    print(markdown(runs), f"\n{time.perf_counter() - started:.0f} s", flush=True)
    return runs


def main(arguments: list[str] | None = None) -> None:
    from training.head.export import read_head
    from training.restore import restore

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--archive", type=Path, default=ARCHIVE, help="the target")
    parser.add_argument("--cases", type=int, default=20, help="conversations a family")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("build/acceptance"))
    options = parser.parse_args(arguments)
    target = Target(restore(options.archive).to(options.device))
    evaluate(target, read_head(options.head, target.unembedding), options.cases, options.out)


if __name__ == "__main__":
    main()
