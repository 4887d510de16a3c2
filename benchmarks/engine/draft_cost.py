"""Measures the host time of a draft: looking tokens up, and walking a grammar's matcher along the draft.

    python -m benchmarks.engine.draft_cost

Microseconds, one thread. The text is random ids below 20,000; the grammar is a JSON schema in the middle
of an answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from benchmarks.timing import times
from chorale.engine.drafts.lookup import follow_longest
from chorale.grammar import constraint
from chorale.grammar.frames import raw_grammar
from chorale.grammar.matcher import MASK_WORDS, compile_grammar
from chorale.harmony.vocab import load_vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}


def microseconds(work: Callable[[], object], count: int = 500) -> float:
    """Returns the median of five runs."""

    def run() -> None:
        for _ in range(count):
            work()

    return statistics.median(times(run, 5)) / count * 1e6


def main() -> None:
    rng = np.random.default_rng(0)
    for length in (1_000, 4_000, 32_000, 131_072):
        tokens = rng.integers(0, 20_000, length, dtype=np.int32)
        spent = microseconds(lambda tokens=tokens: follow_longest(tokens[-5:], tokens, 2, 5))  # type: ignore[misc]
        print(f"look up in {length:>7,} tokens: {spent:6.1f}")
    matcher = compile_grammar(raw_grammar(constraint.json_schema(SCHEMA, "schema")))
    text = load_vocabulary().encode('{"name": "a longer name", "sizes": [1, 20, 300, 4]}')
    begun, draft = text[:6], text[6:10]
    if not matcher.consume_tokens(begun):
        raise SystemExit("the grammar does not allow the text")
    words = np.zeros(MASK_WORDS, np.int32)

    def walk() -> None:
        copy = matcher
        for token in draft:
            copy = copy.deep_copy()
            copy.consume_token(token)
            copy.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    print(f"walk a matcher along {len(draft)} tokens, masks included: {microseconds(walk):6.1f}")


if __name__ == "__main__":
    main()
