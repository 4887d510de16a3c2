"""A hypothesis machine: any order of arrivals, aborts and steps, shrunk to the shortest that breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chorale.engine.engine_state import Drafter
from chorale.engine.types import NOBODY, EngineLimits, GenerateRequest, Owner, SamplingSpec
from tests.support.engine.drafters import Future, Nonsense, Oracle
from tests.support.engine.integrity import check_integrity
from tests.support.engine.simulation import EOS, VOCAB, Life

DRAFTERS: dict[str, Callable[[Future], Drafter]] = {
    "right": lambda future: Oracle(future, most=4),
    "some right": lambda future: Oracle(future, most=9, varies=True, wrong=0.3, vocab_size=VOCAB),
    "nonsense": lambda future: Nonsense(VOCAB, 3),
}


class EngineMachine(RuleBasedStateMachine):
    """Prompts are prefixes of one text, so that blocks are shared as much as possible."""

    life: Life

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from((1, 3, 8)),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 20),
        window=st.integers(1, 12),
        caching=st.booleans(),
        depth=st.sampled_from((0, 1)),
        policy=st.sampled_from(("fcfs", "priority")),
        drafts=st.sampled_from((None, *DRAFTERS)),
        num_host_slots=st.sampled_from((0, 3, 40)),
        max_num_active_seqs=st.sampled_from((0, 1, 2)),
        prefill_interval=st.sampled_from((1, 3)),
        long_prefill=st.sampled_from((0, 2)),
        long_prefill_share=st.booleans(),
        watermark=st.sampled_from((0.0, 0.01, 0.4)),
        batch_waits=st.booleans(),
    )
    def build(
        self,
        max_num_seqs: int,
        budget: int,
        window: int,
        caching: bool,
        depth: Any,
        drafts: str | None,
        **rest: Any,
    ) -> None:
        self.life = Life(
            EngineLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=60,
                sliding_window=window,
                enable_prefix_caching=caching,
                async_scheduling=depth,
                eos_token_ids=EOS,
                vocab_size=VOCAB,
                max_saved_pages=4,
                **rest,
            ),
            stop_probability=0.1,
            make_drafter=None if drafts is None else DRAFTERS[drafts],
        )

    @rule(
        length=st.integers(1, 40),
        n=st.integers(1, 3),
        max_tokens=st.one_of(st.none(), st.integers(0, 12)),
        priority=st.integers(0, 2),
        owner=st.sampled_from((NOBODY, Owner("a"), Owner("b", 3.0))),
        is_batch=st.booleans(),
        prompt_logprobs=st.sampled_from((None, None, 0)),
    )
    def add(self, length: int, priority: int, owner: Owner, is_batch: bool, **sampling: Any) -> None:
        number = len(self.life.requests)
        length = max(1, min(length, self.life.max_len - 1))
        prompt = [(i * i) % VOCAB for i in range(length)]
        if self.life.max_len < 2:
            return
        self.life.add(
            GenerateRequest(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                priority=priority,
                owner=owner,
                is_batch=is_batch,
                sampling=SamplingSpec(seed=number, **sampling),
            )
        )

    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        requests = sorted(self.life.core._engine.requests)
        if requests:
            self.life.abort(requests[choice % len(requests)])

    @rule(choice=st.integers(0, 1000), index=st.integers(0, 2))
    def abort_one_choice(self, choice: int, index: int) -> None:
        requests = sorted(self.life.core._engine.requests)
        if requests:
            self.life.abort(requests[choice % len(requests)], index)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.life.step()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "life"):
            check_integrity(self.life.core)

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.run(5000)
            self.life.check()


EngineMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase
