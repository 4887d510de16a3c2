"""What the cache of compiled grammars says that it holds is what it holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chorale.grammar.constraint import json_schema
from chorale.grammar.frames import Call, Frames, turn_grammar
from chorale.harmony.vocab import VOCAB_SIZE
from chorale.runtime.sampling import grammar

SCRIPT = "tests.runtime.sampling.grammar_weight"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("num_fields", "count"),
    [(20, 50), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 100), (80, 25)))],
)
def test_the_weight_of_a_grammar_is_the_memory_that_it_takes(num_fields: int, count: int) -> None:
    """Compiled, and walked by a request, which makes states that all copies share."""
    command = [sys.executable, "-m", SCRIPT, str(num_fields), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    taken, counted = map(int, done.stdout.split())
    assert 0.5 * counted < taken < 1.1 * counted, (taken, counted)


def test_the_grammars_of_eight_agents_with_128_tools_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {f"argument_{i}": {"type": "string", "description": "x" * 30} for i in range(10)}
    schema = json_schema({"type": "object", "properties": properties, "required": list(properties)}, "tools")
    agents = [tuple(Call(f"tool_{agent}_{i}", schema) for i in range(128)) for agent in range(8)]
    cache = grammar.GrammarCache(VOCAB_SIZE)
    for _ in range(2):
        for calls in agents:
            cache.matcher(turn_grammar(Frames(calls=calls, answer="none")))
        monkeypatch.delattr(grammar, "compile_grammar", raising=False)  # no second compilation
    cache.close()
