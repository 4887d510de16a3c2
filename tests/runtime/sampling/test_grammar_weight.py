"""What the cache of compiled grammars says that it holds is what it holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = "tests.support.grammar_weight"


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
