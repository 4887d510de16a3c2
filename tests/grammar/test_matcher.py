"""When the grammars' tokenizer is built."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from chorale.harmony.vocab import VOCAB_SIZE
from chorale.runtime.sampling.grammar import GrammarCache

# Prints whether the tokenizer was built when the thread has ended.
PROGRAM = """
from chorale.grammar import matcher

timer = matcher.warm({after})
if {is_cancelled}:
    timer.cancel()
timer.join(60)
print(timer.is_alive(), matcher._tokenizer.cache_info().currsize)
"""


@pytest.mark.parametrize(
    ("after", "is_cancelled", "said"),
    [(0.05, False, "False 1"), (1000, True, "False 0")],
    ids=["built", "cancelled"],
)
def test_the_tokenizer_is_built_later_or_not_at_all(after: float, is_cancelled: bool, said: str) -> None:
    program = PROGRAM.format(after=after, is_cancelled=is_cancelled)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == said


def test_an_engines_grammars_that_are_closed_build_none() -> None:
    before = set(threading.enumerate())
    cache = GrammarCache(VOCAB_SIZE)
    cache.warm(after=1000)
    (waiting,) = set(threading.enumerate()) - before
    cache.close()
    waiting.join(60)
    assert not waiting.is_alive()
