"""Requests with grammars wait beside the steps; those that are ready, and all others, do not wait."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits, GenerateRequest, SamplingSpec
from chorale.errors import EngineError
from tests.support.engine.fake_executor import FakeExecutor, FakeModel

LIMITS = EngineLimits(
    num_blocks=64,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=100,
    eos_token_ids=(7,),
)


class Service:
    """Grammars are ready when the test says so."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[str | None]] = {}
        self.contexts: dict[str, list[int]] = {}
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def check(self, grammar: str) -> Future[str | None]:
        return self.futures.setdefault(grammar, Future())

    def prepare(self, sampling: SamplingSpec, context: Sequence[int]) -> Future[str | None]:
        self.contexts[sampling.grammar] = list(context)
        return self.futures.setdefault(sampling.grammar, Future())


def make(**options: Any) -> tuple[EngineCore, Service]:
    service = Service()
    model = FakeModel(eos_token_ids=())
    return EngineCore(LIMITS, FakeExecutor(LIMITS, model, **options), grammars=service), service


def request(name: str, grammar: str = "", **sampling: Any) -> GenerateRequest:
    spec = SamplingSpec(grammar=grammar, max_tokens=3, **sampling)
    return GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling=spec)


def finished(core: EngineCore, steps: int = 20) -> dict[str, str | None]:
    ends: dict[str, str | None] = {}
    for _ in range(steps):
        for chunk in core.step() if core.has_work else []:
            if chunk.finish_reason is not None:
                ends[chunk.request_id] = chunk.error or chunk.finish_reason
    return ends


def test_requests_without_a_grammar_do_not_wait_for_one() -> None:
    core, service = make()
    core.add_request(request("slow", "slow"))
    core.add_request(request("quick", "quick"))
    core.add_request(request("free"))
    service.futures["quick"].set_result(None)
    assert core.stats().num_waiting == 3
    assert finished(core) == {"quick": "length", "free": "length"}
    assert core.has_work
    assert core.stats().num_waiting == 1
    service.futures["slow"].set_result(None)
    assert finished(core) == {"slow": "length"}
    assert not core.has_work


def test_a_refused_grammar_ends_every_choice() -> None:
    core, service = make()
    core.add_request(request("r", "g", n=2))
    service.futures["g"].set_result("no such rule")
    chunks = core.step()
    assert [(chunk.index, chunk.finish_reason, chunk.error) for chunk in chunks] == [
        (0, "error", "no such rule"),
        (1, "error", "no such rule"),
    ]
    assert not core.has_work


def test_the_id_of_a_pending_request_is_in_use_and_can_be_aborted() -> None:
    core, service = make()
    core.add_request(request("r", "g"))
    core.add_request(request("r"))
    assert finished(core, 1) == {"r": "request id 'r' is already in use"}
    core.abort("r")
    assert finished(core) == {"r": "abort"}
    service.futures["g"].set_result(None)  # too late
    assert finished(core) == {}
    core.shutdown()
    assert service.closed


def test_the_context_is_the_end_of_the_prompt() -> None:
    core, service = make()
    core.add_request(request("r", "g", grammar_context=2))
    assert service.contexts["g"] == [2, 3]
    core.add_request(request("s", "g", grammar_context=4))
    assert finished(core, 1) == {"s": "grammar_context is longer than the prompt"}


def test_an_engine_without_grammars_refuses_them() -> None:
    core = EngineCore(LIMITS, FakeExecutor(LIMITS, FakeModel(eos_token_ids=())))
    core.add_request(request("r", "g"))
    assert finished(core) == {"r": "this engine does not support grammars"}


def test_a_failed_step_ends_pending_requests_too() -> None:
    core, _ = make(fail_at_step=0)
    core.add_request(request("held", "g"))
    core.add_request(request("free"))
    with pytest.raises(EngineError):
        finished(core)
    assert {chunk.request_id for chunk in core.take_chunks()} == {"held", "free"}
    assert not core.has_work


def test_a_compiler_that_raises_ends_its_request_alone() -> None:
    core, service = make()
    core.add_request(request("hit", "hit"))
    core.add_request(request("other"))
    service.futures["hit"].set_exception(MemoryError())
    assert finished(core) == {"hit": "the grammar cannot be used: MemoryError", "other": "length"}
