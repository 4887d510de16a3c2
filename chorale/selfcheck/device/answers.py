"""Known answers: log-probabilities of the demo that were computed when it was shipped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from chorale.harmony.vocab import load_vocabulary
from chorale.selfcheck.check import Failed, Found, Skipped
from chorale.selfcheck.device.files import changed_tensors, is_demo
from chorale.selfcheck.device.machine import Machine
from chorale.selfcheck.device.plain import EXACT, Group, rms_norm, run_plain

SHIPPED = Path(__file__).with_name("demo_answers.json")
TEXTS = (
    "<|start|>user<|message|>What is 17 + 25?<|end|>"
    "<|start|>assistant<|channel|>final<|message|>17 + 25 = 42",
    '<|start|>user<|message|>Spell "garden".<|end|><|start|>assistant<|channel|>final<|message|>g-a-r-d-e-n',
    "The numbers from one to ten are one, two, three, four, five, six, seven, eight, nine, ten.",
)
# The vocabulary's tables are computed when the demo is expanded, and may differ by a last bit of bfloat16.
_MEAN, _WORST = 0.003, 0.03


def compute(machine: Machine) -> list[list[float]]:
    """Returns the log-probability of each token of ``TEXTS`` from the second on, by plain float32."""
    vocab, source = load_vocabulary(), machine.plain
    tokens = [vocab.encode_with_special(text) for text in TEXTS]
    with torch.inference_mode():
        group = Group([source.embedded(ids) for ids in tokens], (EXACT,))
        x = run_plain(machine.model, source.layers(), group)[0]
        norm, head = source.read(None, "final_norm").float(), source.read(None, "head")
        found = []
        for own, ids in zip(x.split([len(each) for each in tokens]), tokens, strict=True):
            normed = rms_norm(own[:-1], norm, machine.model.rms_norm_eps)
            logits = torch.cat([normed @ part.float().t() for part in head.split(16384)], 1)
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:], device=x.device).unsqueeze(1))
            found.append(chosen.squeeze(1).tolist())
    return found


def check_answers(machine: Machine) -> Found:
    """Raises ``Skipped`` for other models than the demo: no known answers of those are shipped."""
    if not is_demo(machine.model):
        raise Skipped("known answers are shipped for the demo only; see checksums")
    changed, count = changed_tensors(machine)
    if 2 * len(changed) > count:
        raise Skipped("a model of the demo's sizes with other weights")
    return compare(compute(machine), json.loads(SHIPPED.read_text("ascii")))


def compare(found: Sequence[Sequence[float]], shipped: Sequence[Sequence[float]]) -> Found:
    """Raises ``Failed`` if log-probabilities differ by more than the last bit of a table explains."""
    pairs = [
        pair for own, theirs in zip(found, shipped, strict=True) for pair in zip(own, theirs, strict=True)
    ]
    apart = torch.tensor([abs(one - other) for one, other in pairs])
    mean, worst = float(apart.mean()), float(apart.max())
    if not (mean <= _MEAN and worst <= _WORST):
        raise Failed(f"log-probabilities are off by {mean:.2g} on average and {worst:.2g} at most")
    return Found(f"{len(apart)} log-probabilities are the shipped ones, off by {worst:.1g} at most")
