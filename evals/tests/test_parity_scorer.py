"""Log-probabilities of a prompt from a server, and the errors if it gives none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
import pytest
from chorale_evals.parity.measure import measure, new_plan
from chorale_evals.parity.scorer import Scorer

from chorale.errors import ChoraleError, ConfigError
from chorale.requests.openai_client import AsyncClient, Endpoint, Retries

Respond = Callable[[dict[str, Any]], httpx2.Response]


def scorer(respond: Respond, longest: int | None = None) -> Scorer:
    def handle(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/models"):
            return httpx2.Response(200, json={"data": [{"id": "m", "max_model_len": longest}]})
        return respond(json.loads(request.content))

    retries = Retries(attempts=3, first_delay=0.001)
    client = AsyncClient(
        Endpoint("http://server/v1"), transport=httpx2.MockTransport(handle), retries=retries
    )
    return Scorer(client, "m", "http://server/v1", 2)


def entry(token: int) -> dict[str, Any]:
    """Returns two candidates in vLLM's format: the token is the likeliest, the next id the second."""
    return {
        str(token): {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
        str(token + 1): {"logprob": -1.5, "rank": 2, "decoded_token": "y"},
    }


def by_ids(body: dict[str, Any]) -> httpx2.Response:
    names = [f"token_id:{900 + i}" for i in range(body["max_tokens"])]
    logprobs = {
        "tokens": names,
        "token_logprobs": [-0.25] * len(names),
        "top_logprobs": [{name: -0.25} for name in names],
    }
    prompt = [None, *(entry(token) for token in body["prompt"][1:])]
    return httpx2.Response(200, json={"choices": [{"prompt_logprobs": prompt, "logprobs": logprobs}]})


def test_scores_are_read_from_prompt_logprobs() -> None:
    answer = asyncio.run(scorer(by_ids).score((5, 9, 7), 2))
    assert np.isnan(answer.prompt.token[0])
    assert answer.prompt.token[1:].tolist() == [-0.5, -0.5]
    assert answer.prompt.top_ids[1:].tolist() == [[9, 10], [7, 8]]
    assert answer.greedy == (900, 901)
    assert answer.greedy_scores.token.tolist() == [-0.25, -0.25]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            httpx2.Response(400, json={"error": {"message": "no prompt_logprobs"}}),
            "parity needs /v1/completions",
        ),
        (httpx2.Response(500, json={"error": {"message": "out of order"}}), "out of order"),
        (httpx2.Response(404, text="nothing here"), "HTTP 404: nothing here"),
        (httpx2.Response(200, text="<html>"), "not a completion with log-probabilities"),
        (httpx2.Response(200, json={"choices": []}), "not a completion with log-probabilities"),
        (
            httpx2.Response(200, json={"choices": [{"text": "hello"}]}),
            "not a completion with log-probabilities",
        ),
    ],
)
def test_errors_quote_the_server(response: httpx2.Response, message: str) -> None:
    with pytest.raises(ChoraleError, match=message):
        asyncio.run(scorer(lambda body: response).score((5, 9), 1))


def test_a_busy_server_is_asked_again() -> None:
    left = [429, 503]

    def respond(body: dict[str, Any]) -> httpx2.Response:
        return httpx2.Response(left.pop(), json={}) if left else by_ids(body)

    assert asyncio.run(scorer(respond).score((5, 9), 1)).greedy == (900,)
    assert not left


def test_texts_longer_than_the_server_accepts_are_refused_before_measuring() -> None:
    with pytest.raises(ConfigError, match="takes at most 100 tokens, and the longest text needs 105"):
        asyncio.run(measure(scorer(by_ids, longest=100), new_plan([20, 100], 1, 4, 2), lambda _: None, {}))


def test_the_second_pass_scores_the_continuation_too() -> None:
    prompts: list[list[int]] = []

    def respond(body: dict[str, Any]) -> httpx2.Response:
        prompts.append(body["prompt"])
        return by_ids(body)

    done: list[int] = []
    plan = new_plan([20, 30], 1, 3, 2)
    found = asyncio.run(measure(scorer(respond), plan, done.append, {"where": "here"}))
    assert [len(one.again.token) for one in found.readings] == [23, 33]
    assert sorted(map(len, prompts)) == [20, 23, 30, 33]
    assert all(one.continuation == one.greedy == (900, 901, 902) for one in found.readings)
    assert found.about == {"where": "here"}
    assert sum(done) == plan.num_tokens
