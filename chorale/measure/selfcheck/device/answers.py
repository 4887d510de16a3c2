"""Known answers: log-probabilities of the demo that ``transformers`` computed in float32.

All other numeric checks compare the engine with its own model on the reference ops. This one compares that
model with another implementation, always on the demo's weights. ``scripts/known_answers.py`` writes the file.
"""

from __future__ import annotations

import json

import torch

from chorale.errors import ChoraleError
from chorale.measure.selfcheck.check import Failed, Found, Skipped
from chorale.measure.selfcheck.device.machine import Machine
from chorale.measure.selfcheck.device.reference import Reference
from chorale.measure.selfcheck.recorded import KNOWN_ANSWERS
from chorale.model.demo import ensure_demo
from chorale.model.demo.compare import is_demo

# Factors of the embedding. The small one makes squares as small as the norm's epsilon, so that it matters.
SCALES = (1.0, 2.0**-8)
LAST = 60  # compared tokens at the end of each text
# In float32 the answers agree to 1e-5. But the vocabulary's tables are computed when the demo is expanded,
# and may differ in the last bit of bfloat16. In 1 of 1,000 numbers, this adds 0.0004 on average.
_MEAN, _WORST = 0.001, 0.03


def compute(machine: Machine, texts: list[list[int]], scale: float) -> torch.Tensor:
    """Returns the log-probabilities of the last tokens of each text."""
    reference, head = Reference(machine), machine.read("head")
    lengths = [len(ids) for ids in texts]
    embedded = torch.cat([reference.embedded(ids) for ids in texts])
    found = []
    for x, ids in zip(reference.run(embedded * scale, lengths).split(lengths), texts, strict=True):
        last = min(LAST, len(ids) - 1)
        chosen = torch.tensor(ids[-last:]).unsqueeze(1)
        found.append(reference.logprobs(x[-last - 1 : -1], head).gather(1, chosen).squeeze(1))
    return torch.cat(found)


def check_answers(machine: Machine) -> Found:
    """Checks the demo: the given checkpoint if it is the demo, else a copy expanded in the usual folder."""
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
        if not (mean <= _MEAN and most <= _WORST):
            limits = f"limits {_MEAN:g} and {_WORST:g}, embeddings times {scale:g}"
            raise Failed(
                f"log-probabilities are off by {mean:.2g} on average and {most:.2g} at most ({limits})"
            )
    count = sum(map(len, stored["logprobs"]))
    return Found(f"{count} log-probabilities equal those of transformers within {worst:.1g}")
