"""LocalClient: the engine in a thread, its streams on the event loop. With a fake device: milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from chorale.client.base import EngineInfo
from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits, GenerateRequest, SamplingSpec, StepHandle, StepPlan
from chorale.errors import ConflictError, EngineDeadError, EngineError, QueueFullError
from chorale.testing.fake_executor import FakeExecutor
from tests.support.local_client import LocalClient

LIMITS = EngineLimits(
    num_blocks=200,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=128,
    sliding_window=8,
)
INFO = EngineInfo(model="fake", max_model_len=128, max_num_seqs=4)


class Faulty(FakeExecutor):
    """Fails at the step with number ``fail_at``."""

    fail_at = 10**9

    def execute(self, plan: StepPlan) -> StepHandle:
        if plan.step_id >= self.fail_at:
            raise EngineError("the device is on fire")
        return super().execute(plan)


def request(name: str, *, max_tokens: int = 10, n: int = 1) -> GenerateRequest:
    sampling = SamplingSpec(max_tokens=max_tokens, n=n, ignore_eos=True, seed=1)
    return GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling)


def with_client(
    body: Callable[[LocalClient], Coroutine[Any, Any, None]],
    *,
    fail_at: int = 10**9,
    queued: int | None = None,
    step_seconds: float = 0.0,
) -> LocalClient:
    executor = Faulty(LIMITS, step_seconds=step_seconds)
    executor.fail_at = fail_at
    client = LocalClient(EngineCore(LIMITS, executor), INFO, max_queued_requests=queued)

    async def main() -> None:
        try:
            await asyncio.wait_for(body(client), 30)
        finally:
            await client.close()

    asyncio.run(main())
    assert client.num_in_flight == 0
    return client


async def tokens(client: LocalClient, each: GenerateRequest) -> list[int]:
    return [token async for chunks in client.submit(each) for chunk in chunks for token in chunk.token_ids]


def test_requests_run_together_and_end() -> None:
    async def body(client: LocalClient) -> None:
        found = await asyncio.gather(*(tokens(client, request(f"r{i}", max_tokens=i + 1)) for i in range(12)))
        assert [len(some) for some in found] == list(range(1, 13))
        assert found[11][:5] == found[4]  # the fake's token is a function of the prefix
        assert client.stats.generation_tokens == sum(range(1, 13))

    with_client(body)


def test_leaving_early_aborts() -> None:
    async def body(client: LocalClient) -> None:
        stream = client.submit(request("long", max_tokens=100))
        await anext(stream)
        await stream.aclose()
        assert client.num_in_flight == 0
        await tokens(client, request("next", max_tokens=2))
        assert client.stats.kv_blocks_used == 0

    with_client(body)


def test_a_choice_that_is_dropped_stops_and_the_others_go_on() -> None:
    async def body(client: LocalClient) -> None:
        stream = client.submit(request("long", max_tokens=100, n=3))
        await anext(stream)
        for index in (0, 2):
            stream.drop(index)
        assert client.num_in_flight == 1
        chunks = [chunk for some in [chunks async for chunks in stream] for chunk in some]
        assert [(c.index, c.finish_reason) for c in chunks if c.finish_reason is not None] == [(1, "length")]
        await tokens(client, request("next", max_tokens=2))
        assert client.stats.kv_blocks_used == 0
        assert client.stats.generation_tokens < 200  # not three times a hundred

    with_client(body, step_seconds=0.005)  # time to leave before the end


def test_abort_ends_every_choice() -> None:
    async def body(client: LocalClient) -> None:
        stream = client.submit(request("long", max_tokens=100, n=3))
        first = await anext(stream)
        client.abort("long")
        client.abort("unknown")
        chunks = first + [chunk for some in [chunks async for chunks in stream] for chunk in some]
        assert sorted(c.index for c in chunks if c.finish_reason == "abort") == [0, 1, 2]

    with_client(body)


def test_a_full_queue_refuses() -> None:
    async def body(client: LocalClient) -> None:
        streams = [client.submit(request(f"r{i}", max_tokens=100)) for i in range(6)]
        with pytest.raises(QueueFullError):
            client.submit(request("one too many"))
        for stream in streams:
            await stream.aclose()
        await tokens(client, request("now there is room"))

    with_client(body, queued=2)


def test_the_same_id_twice_is_refused() -> None:
    async def body(client: LocalClient) -> None:
        stream = client.submit(request("a", max_tokens=100))
        with pytest.raises(ConflictError):
            client.submit(request("a"))
        await stream.aclose()

    with_client(body)


def test_a_failed_engine_ends_every_stream_and_takes_no_more() -> None:
    async def body(client: LocalClient) -> None:
        found = await asyncio.gather(
            *(tokens(client, request(f"r{i}", max_tokens=50)) for i in range(3)), return_exceptions=True
        )
        assert all(isinstance(error, EngineDeadError) for error in found)
        assert "on fire" in str(found[0])
        assert client.status.state == "failed"
        with pytest.raises(EngineDeadError, match="on fire"):
            client.submit(request("late"))

    with_client(body, fail_at=3)


def test_closing_ends_streams_and_is_idempotent() -> None:
    async def body(client: LocalClient) -> None:
        stream = client.submit(request("a", max_tokens=100))
        await client.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            client.submit(request("b"))

    client = with_client(body)
    assert client.status.state == "draining"


def test_a_client_may_move_to_another_event_loop() -> None:
    client = LocalClient(EngineCore(LIMITS, FakeExecutor(LIMITS)), INFO)
    assert asyncio.run(tokens(client, request("a"))) == asyncio.run(tokens(client, request("a")))
    asyncio.run(client.close())
