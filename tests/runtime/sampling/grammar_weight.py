"""``python grammar_weight.py FIELDS COUNT``: bytes that used grammars take, and what the cache counts."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from chorale.grammar.matcher import MASK_WORDS
from chorale.harmony.vocab import VOCAB_SIZE, load_vocabulary
from chorale.runtime.sampling.grammar import GrammarCache, weight

EXAMPLES: dict[str, Any] = {"string": "some text", "integer": 12, "number": 1.5, "boolean": True}


def main(num_fields: int, count: int) -> None:
    cache, vocab = GrammarCache(VOCAB_SIZE, cache_bytes=2**40), load_vocabulary()
    room = np.zeros(MASK_WORDS, np.int32)

    def use(number: int) -> int:
        kinds = {f"field_{number}_{i}": list(EXAMPLES)[i % 4] for i in range(num_fields)}
        schema = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in kinds.items()},
            "required": list(kinds),
            "additionalProperties": False,
        }
        text = json.dumps({"grammars": [{"json_schema": schema}]})
        matcher = cache.matcher(text)
        for token in vocab.encode(json.dumps({name: EXAMPLES[kind] for name, kind in kinds.items()})):
            matcher.unsafe_compute_mask_ptr(room.ctypes.data, room.nbytes)
            matcher.consume_token(token)
        return weight(text)

    use(count)  # the tokenizer, and what the first one makes for all
    before = resident()
    counted = sum(use(number) for number in range(count))
    print(resident() - before, counted)


def resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


main(*map(int, sys.argv[1:]))
