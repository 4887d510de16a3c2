"""Prompts add a bounded time to the steps of running streams, whatever they are, and lose no token by it."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from chorale.engine.core import EngineCore
from chorale.engine.plan import ScheduledChunk, StepRecord
from chorale.engine.scheduling.pace import PromptPace
from chorale.engine.types import (
    EngineLimits,
    FetchResult,
    GenerateRequest,
    SamplingSpec,
    StepPlan,
    StepResult,
    TokenChunk,
)
from tests.engine.test_simulation import tight_limits
from tests.support.engine import simulation
from tests.support.engine.fake_executor import FakeExecutor, FakeModel
from tests.support.engine.integrity import check_integrity
from tests.support.engine.simulation import Life, simulate

DELAY = 0.1
LIMITS = EngineLimits(
    num_blocks=3000,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_model_len=32_768,
    prompt_delay=DELAY,
    max_prompt_delay=0.25,
)


@dataclass(frozen=True)
class Speed:
    """Seconds: of a step, of a token, more for each token before it; ``noise``: the factor's spread."""

    step: float = 0.01
    token: float = 0.0015
    position: float = 2e-7
    noise: float = 0.0

    def seconds(self, plan: StepPlan, rng: random.Random) -> float:
        middle = plan.num_computed + plan.num_new / 2
        exact = self.step + float((plan.num_new * (self.token + self.position * middle)).sum())
        return exact * rng.uniform(1 - self.noise, 1 + self.noise)


class TimedExecutor(FakeExecutor):
    """Each step moves ``now`` by what ``speed`` says of it."""

    def __init__(self, limits: EngineLimits, speed: Speed) -> None:
        super().__init__(limits, FakeModel(stop_probability=0.0))
        self.speed, self.now, self._rng = speed, 0.0, random.Random(7)
        self.steps: list[tuple[StepPlan, float]] = []

    def execute(self, plan: StepPlan) -> FetchResult:  # type: ignore[override]
        result = super().execute(plan)()
        seconds = self.speed.seconds(plan, self._rng)
        self.steps.append((plan, seconds))
        return Timed(self, replace(result, seconds=seconds))


@dataclass
class Timed:
    device: TimedExecutor
    step_result: StepResult

    def __call__(self) -> StepResult:
        self.device.now += self.step_result.seconds
        return self.step_result


@dataclass
class Scene:
    """An engine over ``TimedExecutor``. Sizes change ``LIMITS``."""

    speed: Speed = field(default_factory=Speed)
    sizes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limits = replace(LIMITS, **self.sizes)
        self.device = TimedExecutor(self.limits, self.speed)
        self.core = EngineCore(self.limits, self.device, lambda: self.device.now)
        self.times: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, prompt: int, output: int, seed: int = 1, **fields: Any) -> None:
        ids = [(seed * 7919 + i * i) % 1000 for i in range(prompt)]
        spec = SamplingSpec(ignore_eos=True, max_tokens=output, seed=seed, **fields)
        self.core.add_request(GenerateRequest(request_id=name, prompt_token_ids=ids, sampling=spec))

    def step(self) -> list[TokenChunk]:
        chunks = self.core.step()
        if len(self.device.steps) % 100 == 0:
            check_integrity(self.core)
        for chunk in chunks:
            assert chunk.error is None
            self.times[chunk.request_id].append(self.device.now)
        return chunks

    def run(self, until: str | None = None) -> None:
        """To the end, or until a request has said something."""
        while self.core.has_work and (until is None or not self.times[until]):
            self.step()

    def ask(self, name: str, prompt: int, output: int, **fields: Any) -> None:
        self.add(name, prompt, output, **fields)
        self.run(until=name)

    def longest_gap(self, name: str) -> float:
        times = self.times[name]
        return max(after - before for before, after in pairwise(times))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("prompts", "length", "fields"),
    [
        (1, 8000, {}),
        (1, 16_000, {}),
        (16, 1000, {}),
        (4, 3000, {"n": 4}),
        (200, 40, {}),
        (3, 2000, {"prompt_logprobs": 1}),
    ],
)
def test_a_stream_hardly_waits_for_prompts(
    depth: Literal[0, 1], prompts: int, length: int, fields: dict[str, Any]
) -> None:
    scene = Scene(sizes={"async_scheduling": depth})
    scene.ask("stream", 60, 2000)
    for number in range(prompts):
        scene.add(f"p{number}", length, 2, seed=number + 2, **fields)
    scene.run(until=f"p{prompts - 1}")
    assert scene.longest_gap("stream") < 0.3, "more than the bound where many wait, and the step itself"
    assert scene.device.now < 3 * prompts * length * 0.0045 + 30, "prompts go on"


def test_without_a_bound_a_stream_waits_for_whole_chunks() -> None:
    """What the bound is for."""
    scene = Scene(sizes={"prompt_delay": 0.0})
    scene.ask("stream", 60, 300)
    scene.ask("long", 8000, 1)
    assert scene.longest_gap("stream") > 3


def test_the_bound_holds_before_any_measurement() -> None:
    """The stream's own prompt was in the prefix cache, and no step had prompts but for one token."""
    scene = Scene()
    scene.add("first", 64, 1)
    scene.run()
    scene.core._scheduler._pace.__init__(scene.limits)  # type: ignore[misc]
    scene.ask("stream", 64, 200)
    scene.ask("long", 6000, 1, seed=5)
    assert scene.longest_gap("stream") < 0.3


def test_the_bound_holds_on_slow_and_noisy_machines() -> None:
    for speed, most in ((Speed(0.05, 0.03, 0.0), 0.4), (Speed(noise=0.6), 0.4)):
        scene = Scene(speed)
        scene.ask("stream", 20, 3000)
        scene.ask("long", 1000, 1, seed=3)
        assert scene.longest_gap("stream") < most


def test_a_prompt_gets_one_token_where_even_that_exceeds_the_bound() -> None:
    scene = Scene(Speed(0.5, 1.0, 0.0))
    scene.ask("stream", 2, 100)
    scene.ask("long", 20, 1, seed=3)
    assert max(plan.num_tokens for plan, _ in scene.device.steps) == 2
    assert len(scene.times["stream"]) >= 20


def test_the_bound_holds_after_a_long_prefix_hit() -> None:
    """Costs were measured at the beginning of prompts only; then 28,000 tokens are found in the cache."""
    scene = Scene(Speed(position=1e-6))  # the last tokens cost 20 times the first
    scene.add("seen", 28_000, 1)
    scene.run()
    scene.core._scheduler._pace.__init__(scene.limits)  # type: ignore[misc]
    scene.ask("stream", 60, 3000, seed=9)
    scene.ask("short", 500, 1, seed=4)
    scene.ask("again", 30_000, 1)
    assert scene.core.stats().prefix_cache_hits >= 27_000
    assert scene.longest_gap("stream") < 0.3


def test_without_streams_steps_are_full() -> None:
    scene = Scene()
    scene.add("long", 8000, 1)
    scene.run()
    assert [plan.num_tokens for plan, _ in scene.device.steps] == [2048, 2048, 2048, 1856]


def test_under_block_pressure_streams_are_recomputed_within_the_bound() -> None:
    scene = Scene(sizes={"num_blocks": 330, "max_model_len": 4096})
    for number in range(3):
        scene.add(f"s{number}", 700, 900, seed=number + 1)
    scene.run(until="s2")
    scene.ask("short", 30, 1500, seed=8)
    scene.run()
    assert scene.core.stats().num_preemptions > 0
    for plan, seconds in scene.device.steps[10:]:
        if (plan.num_new == 1).sum() and (plan.num_new > 1).any():
            assert seconds < 0.3 + 0.0025 * len(plan.rows), plan


GPU = {"prompt_delay": 0.012, "least_chunk": 1024, "max_num_batched_tokens": 8192, "num_blocks": 20_000}
LAUNCHED = Speed(0.02, 13e-6, 0.0)  # a step whose fixed part is more than the bound


def with_streams(count: int, speed: Speed = LAUNCHED, **sizes: Any) -> Scene:
    """A GPU's sizes. ``count`` streams run, and what prompts take has been seen beside them."""
    scene = Scene(speed, GPU | {"max_num_seqs": 256} | sizes)
    for number in range(count):
        scene.add(f"s{number}", 50 if number else 1024, 3000, seed=number + 1)
    scene.run(until=f"s{count - 1}")
    for number in range(4):
        scene.ask(f"seen{number}", 1024, 1, seed=50 + number)
    scene.device.steps.clear()
    return scene


def chunks_of(plan: StepPlan) -> list[int]:
    return [int(count) for count in plan.num_new if count > 1]


def test_a_step_has_one_prompt_where_the_fixed_part_dominates() -> None:
    scene = with_streams(4)
    for number, length in enumerate((1024, 1000, 1270, 40, 700, 3000)):
        scene.add(f"p{number}", length, 1, seed=60 + number)
    scene.run(until="p5")
    found = [chunks for plan, _ in scene.device.steps if (chunks := chunks_of(plan))]
    assert found[:3] == [[1024], [1000, 24], [1246]] or found[:3] == [[1024], [1000], [1270]], found
    assert all(sum(chunks) <= 1280 for chunks in found), "never two whole prompts"
    assert len(found) <= 8, "and no small pieces"


@pytest.mark.parametrize(("prompts", "chunks"), [(3, 1), (8, 2), (16, 4), (64, 4)])
def test_more_prompts_get_more_least_chunks_up_to_four(prompts: int, chunks: int) -> None:
    """On a device so slow that the least chunks are more than the bound on time."""
    scene = with_streams(4, Speed(0.02, 1e-3, 0.0), max_num_seqs=128)
    for number in range(prompts):
        scene.add(f"p{number}", 1024, 1, seed=60 + number)
    found: list[int] = []
    while not found:
        scene.step()
        found = chunks_of(scene.device.steps[-1][0])
    assert sum(found) == 1024 * chunks


def test_one_slow_step_at_most_doubles_a_cost() -> None:
    """A graph is captured in the step: hundreds of times what was expected, once."""
    scene = with_streams(4, Speed(0.004, 3e-6, 0.0))
    pace = scene.core._scheduler._pace
    before = pace.cost(0)
    scene.device.speed = Speed(2.0, 3e-6, 0.0)
    scene.ask("slow", 1024, 1, seed=60)
    assert before < pace.cost(0) <= 2 * before


def test_short_prompts_do_not_raise_the_cost_of_a_token() -> None:
    """The fixed part of their steps is a hundred times their tokens' part."""
    scene = with_streams(4)
    pace = scene.core._scheduler._pace
    before = pace.cost(0)
    for number in range(10):
        scene.ask(f"p{number}", 17, 1, seed=60 + number)
    assert pace.cost(0) <= before


def test_far_into_a_prompt_chunks_are_shorter() -> None:
    scene = with_streams(2, Speed(0.005, 9e-6, 5e-10))
    scene.ask("long", 32_000, 1, seed=70)
    found = [chunks[0] for plan, _ in scene.device.steps if (chunks := chunks_of(plan))]
    assert found[0] >= 1024
    assert 256 <= min(found[:-1]) <= max(found[-8:]) < 1024


@pytest.mark.parametrize(("rate", "most"), [(20, 2), (30, 10), (40, 20)])
def test_a_queue_of_prompts_drains(rate: int, most: int) -> None:
    """Forty prompts at once, then fewer or more a second than the 30 that one a step would be."""
    scene = with_streams(4)
    start, sent = scene.device.now, 0
    lengths = []
    for number in range(40):
        scene.add(f"b{number}", 1024, 1, seed=100 + number)
    while scene.device.now < start + 6:
        while sent < (scene.device.now - start) * rate:
            scene.add(f"p{sent}", 1024, 1, seed=200 + sent)
            sent += 1
        scene.step()
        lengths.append(scene.core.stats().num_waiting)
    assert max(lengths[-20:]) <= most


@pytest.mark.parametrize(
    ("depth", "block_size"),
    [(0, 16), (1, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 1), (1, 16)))],
)
def test_a_busy_engine_with_a_bound_gives_every_request_its_tokens(
    depth: Literal[0, 1], block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation of ``test_simulation.py`` with steps that take time: aborts, preemptions, n, hits."""
    monkeypatch.setattr(simulation, "FakeExecutor", lambda limits, model: SlowExecutor(limits, model))
    preemptions = 0
    for seed in range(2):
        rng = random.Random(f"pace{depth}{block_size}{seed}")
        limits = tight_limits(rng, depth, True, block_size, "priority" if seed % 2 else "fcfs")
        limits = replace(limits, prompt_delay=0.01, max_prompt_delay=0.02, least_chunk=rng.choice((1, 4)))
        life: Life = simulate(limits, 50, seed)
        preemptions += life.core.stats().num_preemptions
    assert preemptions > 5


def test_costs_are_estimated_from_the_steps_before() -> None:
    pace = PromptPace(LIMITS)
    plan = SimpleNamespace(num_tokens=512)
    pace.observe(StepRecord(plan, 0, [ScheduledChunk(None, 2048, 512)]), 0.05)  # type: ignore[arg-type]
    known = pace.cost(2048)
    assert (pace.cost(0), pace.cost(4096), pace.cost(16_384)) == (known, 2 * known, 8 * known)
    for seconds, expected in ((0.02, 0.02), (0.01, 0.0125), (0.02, 0.014375)):  # slower upwards
        pace.observe(StepRecord(None, 4, []), seconds)  # type: ignore[arg-type]
        assert pace.decode_seconds(4) == pytest.approx(expected)


class SlowExecutor(FakeExecutor):
    def execute(self, plan: StepPlan) -> Any:
        handle = super().execute(plan)
        seconds = 0.001 + 0.002 * plan.num_tokens
        return replace(handle, step_result=replace(handle(), seconds=seconds))
