"""``EngineStats.prompt_tokens_left``: what a router adds up. (The queue's part is in ``check_integrity``.)"""

from __future__ import annotations

from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits, GenerateRequest, SamplingSpec
from chorale.testing.fake_executor import FakeExecutor, FakeModel

LIMITS = EngineLimits(
    num_blocks=200, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=400
)


def asked(name: str, prompt: int, **fields: int) -> GenerateRequest:
    sampling = SamplingSpec(max_tokens=20, ignore_eos=True, n=fields.pop("n", 1))
    ids = [len(name)] * prompt
    return GenerateRequest(request_id=name, prompt_token_ids=ids, sampling=sampling, **fields)


def test_prompts_count_until_they_are_computed() -> None:
    core = EngineCore(LIMITS, FakeExecutor(LIMITS, FakeModel(stop_probability=0.0)))
    core.add_request(asked("a", 40))
    core.add_request(asked("bb", 30, num_expected_cached=28))
    assert core.stats().prompt_tokens_left == 42
    core.step()  # 16 of the first
    assert core.stats().prompt_tokens_left == 26
    core.abort("bb")
    assert core.stats().prompt_tokens_left == 24
    core.step()
    core.step()
    assert core.stats().prompt_tokens_left == 0
    assert core.stats().num_running == 1
    core.add_request(asked("ccc", 10, num_expected_cached=10))  # the last token is always computed
    assert core.stats().prompt_tokens_left == 1
    while core.has_work:
        core.step()
    assert core.stats().prompt_tokens_left == 0


def test_siblings_share_their_prompt() -> None:
    core = EngineCore(LIMITS, FakeExecutor(LIMITS, FakeModel(stop_probability=0.0)))
    core.add_request(asked("a", 16, n=3))
    assert core.stats().prompt_tokens_left == 16
    core.step()
    assert core.stats().prompt_tokens_left <= 2  # the other choices compute a token each
    while core.has_work:
        core.step()
    assert core.stats().prompt_tokens_left == 0
