"""Measures grammars on this CPU: compilation, and the masks of a step of 1 and of 64 rows.

    python -m benchmarks.engine.grammar_cost [--steps 150]

Walks matchers through valid output (a random allowed token at each step, closing tokens preferred), and
prints microseconds: filling the masks of a step (one thread below 8 rows, all cores from there on), and
applying one row's mask in the sampler. Filling includes advancing the matchers by a token. On a GPU it runs
while the device computes the forward pass.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from benchmarks.timing import spent
from chorale.engine.types import RowStart, SamplingSpec
from chorale.grammar.constraint import json_schema, regex
from chorale.grammar.frames import Call, Frames, turn_grammar
from chorale.grammar.matcher import compile_grammar, tokenizer
from chorale.harmony.vocab import NUM_RANKS, VOCAB_SIZE, load_vocabulary
from chorale.kernels.ops import Allowed
from chorale.kernels.reference.sampling.sampling import ReferenceSampler
from chorale.runtime.device import open_device
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows

_ITEM = {
    "type": "object",
    "properties": {
        "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
        "note": {"type": "string", "maxLength": 40},
    },
    "required": ["sku", "quantity"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "date": {"type": "string", "format": "date"},
        "email": {"type": "string", "format": "email"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 20},
        "status": {"enum": ["open", "paid", "shipped"]},
    },
    "required": ["id", "date", "items", "status"],
    "additionalProperties": False,
    "$defs": {"item": _ITEM},
}


def grammars() -> dict[str, str]:
    order = json_schema(ORDER, "schema")
    return {
        "order schema": turn_grammar(Frames(answer=order)),
        "json_object": turn_grammar(Frames(answer=json_schema({"type": "object"}, "schema"))),
        "regex": turn_grammar(Frames(answer=regex("([a-z]{2,8} ){200}", "regex"))),
        "8 strict functions": turn_grammar(Frames(calls=tuple(Call(f"f{n}", order) for n in range(8)))),
        "reasoning only": turn_grammar(Frames(answer="any")),
    }


def advance(rows: GrammarRows, octets: torch.Tensor, rng: np.random.Generator) -> np.ndarray:
    """Returns a random allowed token for each row, an ordinary one if the mask has any."""
    tokens = []
    for row in octets.numpy():
        allowed = np.flatnonzero(np.unpackbits(row, bitorder="little"))
        ordinary = allowed[allowed < NUM_RANKS]
        tokens.append(int(rng.choice(ordinary if len(ordinary) else allowed)))
    return np.array(tokens)


def walk(grammar: str, prefix: str, num_rows: int, num_steps: int) -> dict[str, float]:
    device = open_device("cpu", 1)
    rows = GrammarRows(device, GrammarCache(VOCAB_SIZE))
    begun = np.array(load_vocabulary().encode_with_special(prefix), np.int32)
    known = np.concatenate([np.zeros(1, np.int32), begun])
    numbers = np.arange(num_rows, dtype=np.int32)
    for row in range(num_rows):
        rows.start(RowStart(row, known, 1, SamplingSpec(grammar=grammar), 0, ()))
    rng = np.random.default_rng(0)
    scores = torch.zeros(1, VOCAB_SIZE)
    sampler = ReferenceSampler(torch.zeros(VOCAB_SIZE, dtype=torch.uint8), rows_at_once=1)
    index = torch.zeros(1, dtype=torch.int32)  # the only row of ``scores`` uses the first mask
    fill, apply = [], []
    for _ in range(num_steps):
        start = time.perf_counter()
        masks = rows.masks(numbers)
        fill.append(time.perf_counter() - start)
        assert masks is not None
        allowed = Allowed(index, masks.octets)
        apply.append(spent(lambda: sampler.forbid(scores, allowed)))  # noqa: B023
        if not masks.octets.any(dim=1).all():
            break
        tokens = advance(rows, masks.octets, rng)
        rows.sampled(numbers, lambda tokens=tokens: [tokens])  # type: ignore[misc]
    fill = fill[3:]  # the first steps build the automaton's first states
    return {
        "fill mean": statistics.mean(fill) * 1e6,
        "p50": statistics.median(fill) * 1e6,
        "max": max(fill) * 1e6,
        "apply": statistics.median(apply) * 1e6,
    }


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=150)
    given = options.parse_args()
    print(f"tokenizer (once a process, in a thread at start)  {spent(tokenizer):.2f} s")
    prefixes = {"reasoning only": "<|channel|>analysis<|message|>"}
    call = "<|channel|>commentary to=functions.f3<|message|>"
    print(
        f"{'microseconds':24s}{'rows':>5s}{'compile':>9s}{'fill mean':>11s}{'p50':>8s}{'max':>8s}"
        f"{'apply a row':>13s}"
    )
    for name, grammar in grammars().items():
        compiled = spent(lambda: compile_grammar(grammar)) * 1e6  # noqa: B023
        prefix = prefixes.get(name, call if "functions" in name else "<|channel|>final<|message|>")
        for num_rows in (1, 64):
            found = walk(grammar, prefix, num_rows, given.steps)
            print(
                f"{name:24s}{num_rows:5d}{compiled:9.0f}{found['fill mean']:11.0f}{found['p50']:8.0f}"
                f"{found['max']:8.0f}{found['apply']:13.0f}"
            )


if __name__ == "__main__":
    main()
