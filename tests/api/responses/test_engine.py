"""The real engine on a random checkpoint: the fold of the stream is the body, greedy and sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorale.config import EngineConfig
from chorale.model.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from chorale.serve.engine.build import build_engine
from tests.support.local_client import LocalClient
from tests.support.responses import MODEL, TOOL, fold_events, serve, without_ids


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClient]:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    config = make_config(layers=2, experts=4, hidden=64, inter=64, heads=4, kv_heads=2, head_dim=32)
    write_random_checkpoint(folder, config, seed=3)
    core, info = build_engine(
        EngineConfig(model=str(folder), device="cpu", max_model_len=2048, max_num_seqs=8, num_threads=1)
    )
    client = LocalClient(core, info)
    yield client
    asyncio.run(client.close())


def comparable(body: dict[str, Any]) -> Any:
    """Without ids, and without what the second of two equal requests found in the cache."""
    body["usage"]["input_tokens_details"]["cached_tokens"] = 0
    return without_ids(body)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_fold_of_the_stream_is_the_body(client: LocalClient, temperature: float) -> None:
    async def scenario() -> None:
        async with serve(engine=client) as server:
            for seed in range(4):
                request = {
                    "model": MODEL,
                    "input": f"question {seed}",
                    "tools": [TOOL],
                    "temperature": temperature,
                    "seed": seed,
                    "max_output_tokens": 24,
                }
                _, whole = await server.post(**request)
                folded = fold_events(await server.events(**request))
                assert comparable(folded) == comparable(whole)
                assert folded["usage"]["output_tokens"] > 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_second_turn_finds_the_first_in_the_prefix_cache(client: LocalClient) -> None:
    """The pages of turn one serve turn two."""

    async def scenario() -> None:
        async with serve(engine=client) as server:
            filler = "Some words to fill pages. " * 20
            _, first = await server.post(input=filler, max_output_tokens=24, seed=1)
            _, second = await server.post(
                input="go on",
                previous_response_id=first["id"],
                max_output_tokens=4,
                reasoning={"context": "all_turns"},
            )
            told = first["usage"]["input_tokens"]
            cached = second["usage"]["input_tokens_details"]["cached_tokens"]
            assert cached >= told - 2 * client.info.block_size

    asyncio.run(asyncio.wait_for(scenario(), 60))
