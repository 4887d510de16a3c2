"""What the cache of compiled grammars says that it holds is what it holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = "tests.support.grammar_weight"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("num_fields", [2, 20, 80])
def test_the_weight_of_a_grammar_is_the_memory_that_it_takes(num_fields: int) -> None:
    """Compiled, and walked by a request, which makes states that all copies share."""
    done = subprocess.run(
        [sys.executable, "-m", SCRIPT, str(num_fields)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    taken, counted = map(int, done.stdout.split())
    assert 0.5 * counted < taken < 1.1 * counted, (taken, counted)
