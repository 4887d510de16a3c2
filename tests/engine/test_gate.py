"""Requests whose grammars compile: they wait beside the steps, and leave by every way out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from chorale.engine.core import EngineCore
from chorale.engine.types import SamplingSpec
from chorale.errors import EngineError

from .recording import Engine, ends
from .simulation import Ticker


class Compiler:
    """Grammars that are ready when the test says so."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[str | None]] = {}

    def prepare(self, sampling: SamplingSpec, context: Sequence[int]) -> Future[str | None]:
        self.futures[sampling.grammar] = Future()
        return self.futures[sampling.grammar]


def gated(**options: int) -> tuple[Engine, Compiler]:
    engine, compiler = Engine(**options), Compiler()
    engine.core = EngineCore(engine.limits, engine.executor, Ticker(), compiler)
    return engine, compiler


def test_others_run_while_a_grammar_compiles() -> None:
    engine, compiler = gated()
    engine.add("g", 5, max_tokens=3, grammar="x", n=2)
    engine.add("plain", 5, max_tokens=3)
    chunks = [chunk for _ in range(5) for chunk in engine.step()]
    assert ends(chunks) == [("plain", 0, "length")]
    assert engine.core.stats().num_waiting == 1
    engine.add("g", 5)
    assert [chunk.error for chunk in engine.step()] == ["request id 'g' is already in use"]
    compiler.futures["x"].set_result(None)
    assert ends(engine.run()) == [("g", 0, "length"), ("g", 1, "length")]


@pytest.mark.parametrize("compiled", [False, True])
def test_an_abort_reaches_a_request_whose_grammar_compiles(compiled: bool) -> None:
    engine, compiler = gated()
    engine.add("g", 5, grammar="x", n=2)
    engine.step()
    engine.core.abort("g")
    if compiled:
        compiler.futures["x"].set_result(None)
    assert ends(engine.run()) == [("g", 0, "abort"), ("g", 1, "abort")]
    assert engine.plans == []
    engine.add("g", 5, max_tokens=1)  # the id is free
    assert ends(engine.run()) == [("g", 0, "length")]


def test_a_grammar_that_cannot_be_used_ends_its_request_alone() -> None:
    engine, compiler = gated()
    for name in ("refused", "raises"):
        engine.add(name, 5, grammar=name)
    compiler.futures["refused"].set_result("no such rule")
    compiler.futures["raises"].set_exception(MemoryError())
    engine.add("plain", 5, max_tokens=2)
    chunks = engine.run()
    assert sorted(ends(chunks)) == [("plain", 0, "length"), ("raises", 0, "error"), ("refused", 0, "error")]
    assert {chunk.error for chunk in chunks if chunk.error} == {
        "no such rule",
        "the grammar cannot be used: MemoryError",
    }


def test_a_failed_step_ends_those_that_wait_for_a_grammar_too() -> None:
    engine, _ = gated(fail_at_step=0)
    engine.add("g", 5, grammar="x")
    engine.add("plain", 5)
    with pytest.raises(EngineError):
        engine.step()
    assert sorted(ends(engine.core.take_chunks())) == [("g", 0, "error"), ("plain", 0, "error")]
    assert not engine.core.has_work
