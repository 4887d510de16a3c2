"""An engine with a FakeExecutor that records the plans it executes."""

from __future__ import annotations

from typing import Any

from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits, GenerateRequest, SamplingSpec, StepPlan, TokenChunk
from tests.support.engine.fake_executor import FakeExecutor, FakeHandle, FakeModel
from tests.support.engine.integrity import check_integrity
from tests.support.engine.simulation import Ticker

DEFAULTS: dict[str, Any] = {
    "num_blocks": 64,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 200,
    "sliding_window": 6,
    "vocab_size": 1000,
    "eos_token_ids": (7,),
}


class RecordingExecutor(FakeExecutor):
    def __init__(self, limits: EngineLimits, model: FakeModel, **options: Any) -> None:
        super().__init__(limits, model, **options)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> FakeHandle:
        self.plans.append(plan)
        return super().execute(plan)


class Engine:
    """Keyword arguments override ``DEFAULTS``. By default the model never stops by itself."""

    def __init__(
        self, *, stop_probability: float = 0.0, fail_at_step: int | None = None, **changes: Any
    ) -> None:
        self.limits = EngineLimits(**(DEFAULTS | changes))
        self.model = FakeModel(
            vocab_size=1000, eos_token_ids=self.limits.eos_token_ids, stop_probability=stop_probability
        )
        self.executor = RecordingExecutor(self.limits, self.model, fail_at_step=fail_at_step)
        self.core = EngineCore(self.limits, self.executor, Ticker())

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    def add(self, name: str, prompt: list[int] | int, **fields: Any) -> GenerateRequest:
        """``prompt``: token ids, or their number. ``fields``: those of the request or of its sampling."""
        ids = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
        names = ("priority", "owner", "cache_salt", "arrival_time", "is_batch", "num_expected_cached")
        own = {key: fields.pop(key) for key in names if key in fields}
        fields = {"seed": 1, "ignore_eos": True} | fields
        request = GenerateRequest(
            request_id=name, prompt_token_ids=ids, sampling=SamplingSpec(**fields), **own
        )
        self.core.add_request(request)
        return request

    def step(self) -> list[TokenChunk]:
        chunks = self.core.step()
        check_integrity(self.core)
        return chunks

    def run(self) -> list[TokenChunk]:
        """Steps until no work is left. Returns all chunks."""
        chunks: list[TokenChunk] = []
        for _ in range(2000):
            if not self.core.has_work:
                return chunks
            chunks += self.step()
        raise AssertionError("no end after 2000 steps")


def tokens_by_choice(chunks: list[TokenChunk]) -> dict[tuple[str, int], list[int]]:
    out: dict[tuple[str, int], list[int]] = {}
    for chunk in chunks:
        out.setdefault((chunk.request_id, chunk.index), []).extend(chunk.token_ids)
    return out


def ends(chunks: list[TokenChunk]) -> list[tuple[str, int, str]]:
    """Returns (request, choice, finish reason) of the final chunks, in order."""
    return [(c.request_id, c.index, c.finish_reason) for c in chunks if c.finish_reason is not None]
