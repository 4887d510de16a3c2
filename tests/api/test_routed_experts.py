"""``routed_experts`` of Chat Completions and Completions; the experts of the engine depend on the prefix."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from chorale.api.limits import SIZES
from chorale.api.routed_experts import expert_field
from chorale.engine.types import ExpertIds, SamplingSpec
from chorale.turns.events import TurnEnded, Usage
from chorale.turns.request import TurnRequest
from tests.support.engine.fake_executor import FakeModel, fake_experts
from tests.support.local_client import on_fake_device
from tests.support.scripted import ANALYSIS, changing, events_of, playing
from tests.support.server import Server, served

NAME, SHAPE = "routed_experts_prompt_start", (2, 4)


def decoded(text: str) -> ExpertIds:
    found: ExpertIds = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    assert found.dtype == np.uint8
    return found


def check(choice: dict[str, Any], prompt: list[int], start: int) -> None:
    hashes = FakeModel().prefix_hashes(np.array([*prompt, *choice["token_ids"]], np.int32))
    stop = max(len(prompt), len(hashes) - 1)
    np.testing.assert_array_equal(decoded(choice["routed_experts"]), fake_experts(hashes[start:stop]))


async def test_each_choice_has_those_of_its_prompt_and_output() -> None:
    fields: dict[str, Any] = {"seed": 1, "n": 2, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    async with on_fake_device(routed_experts=SHAPE) as client, served(client) as server:
        chat = (await server.chat(**{**fields, "logprobs": True}, store=True, max_tokens=20)).json()
        for choice in chat["choices"]:
            check(choice, chat["prompt_token_ids"], 0)
        stored = (await server.http.get(f"/v1/chat/completions/{chat['id']}")).json()
        assert [key for key in chat["choices"][0] if key not in stored["choices"][0]] == ["routed_experts"]
        for max_tokens in (0, 9):
            asked = {**fields, "max_tokens": max_tokens, NAME: 3, "echo": True}
            several = (await server.complete([[8, 9, 4], [5, 6, 7, 8]], **asked)).json()
            assert [len(each["token_ids"]) for each in several["choices"]] == [max_tokens] * 4
            for choice in several["choices"]:
                check(choice, choice["prompt_token_ids"], 3)
        chunks = events_of(await server.chat(stream=True, max_tokens=3))
        assert all("routed_experts" not in choice for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_tokens_after_a_stop_string_are_left_out(num_tokens: int) -> None:
    """The engine's last chunk had three tokens; the prompt's experts are megabytes."""
    chosen = np.random.default_rng(0).integers(0, 128, (60_003, 36, 4), dtype=np.uint8)
    sampling, prompt = SamplingSpec(routed_experts_start=1), [1] * 60_001
    turn = TurnRequest(request_id="a", prompt_token_ids=prompt, sampling=sampling, expert_shape=(36, 4))
    parts, output = (chosen[:60_000].tobytes(), chosen[60_000:].tobytes()), tuple(range(num_tokens))
    ended = TurnEnded("stop", Usage(), output_token_ids=output, routed_experts=parts)
    found = decoded(msgspec.json.decode(expert_field(turn, ended)["routed_experts"]))
    np.testing.assert_array_equal(found, chosen[: 60_000 + num_tokens - 1])


async def test_they_are_null_if_the_server_began_the_answer() -> None:
    client = changing(
        f"{ANALYSIS}Hm.<|return|>", lambda _, chunk: setattr(chunk, "routed_experts", [b"12345678"])
    )
    client.info_value = msgspec.structs.replace(client.info_value, routed_experts=SHAPE)
    async with served(client) as server:
        (choice,) = (await server.chat()).json()["choices"]
    assert (len(client.requests), choice["routed_experts"]) == (2, None)


async def test_without_the_flag_answers_do_not_have_the_field() -> None:
    async with served(playing("Hello.<|return|>")) as server:
        for answer in (await server.chat(**{NAME: 0}), await server.complete("Hello")):
            assert "routed_experts" not in answer.json()["choices"][0]
        await check_refused(server, {NAME: 1})


async def check_refused(server: Server, fields: dict[str, Any]) -> None:
    response = await server.complete([1, 2, 3], **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, NAME)


async def test_bad_starts_and_too_large_answers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "routed_experts", replace(SIZES["routed_experts"], max=6))
    async with on_fake_device(routed_experts=SHAPE) as client, served(client) as server:
        for fields in ({NAME: -1}, {NAME: 4}, {NAME: 1.5}, {NAME: 1, "stream": True}, {"n": 3}):
            await check_refused(server, fields)
        assert (await server.complete([1, 2, 3], n=3, max_tokens=1, **{NAME: 1})).status_code == 200
