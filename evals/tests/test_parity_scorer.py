"""The two forms in which servers give log-probabilities of a prompt, and the error if they give neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
import pytest
from chorale_evals.parity.measure import measure, new_plan
from chorale_evals.parity.scorer import Scorer

from chorale.errors import ChoraleError, ConfigError

Respond = Callable[[dict[str, Any]], httpx2.Response]


def scorer(respond: Respond, longest: int | None = None) -> Scorer:
    def handle(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/models"):
            return httpx2.Response(200, json={"data": [{"id": "m", "max_model_len": longest}]})
        return respond(json.loads(request.content))

    client = httpx2.Client(transport=httpx2.MockTransport(handle), base_url="http://server/v1")
    return Scorer(client, "m", "http://server/v1", 2, sleep=lambda _: None)


def entry(token: int) -> dict[str, Any]:
    """The token is likeliest, and the next one follows; vLLM adds ranks and strings."""
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


def by_echo(body: dict[str, Any]) -> httpx2.Response:
    if "prompt_logprobs" in body:
        return httpx2.Response(400, json={"error": {"message": "unknown field prompt_logprobs"}})
    names = [f"t{token}" for token in body["prompt"]] + ["more"] * body["max_tokens"]
    values = [None, *([-0.5] * (len(names) - 1))]
    top = [None, *({name: -0.5, "other": -2.0} for name in names[1:])]
    logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": top}
    return httpx2.Response(200, json={"choices": [{"logprobs": logprobs}]})


def test_prompt_logprobs() -> None:
    one = scorer(by_ids)
    answer = one.score((5, 9, 7), 2)
    assert np.isnan(answer.prompt.token[0])
    assert answer.prompt.token[1:].tolist() == [-0.5, -0.5]
    assert answer.prompt.top_ids[1:].tolist() == [[9, 10], [7, 8]]
    assert answer.greedy == (900, 901)
    assert answer.greedy_scores.token.tolist() == [-0.25, -0.25]
    assert one.form == "prompt_logprobs"


def test_echo_if_that_is_all_there_is() -> None:
    one = scorer(by_echo)
    answer = one.score((5, 9, 7), 2)
    assert (len(answer.prompt.token), answer.greedy) == (3, ())  # strings of tokens are no ids
    assert answer.prompt.token[1:].tolist() == [-0.5, -0.5]
    assert answer.prompt.top_ids[1, 0] != answer.prompt.top_ids[2, 0]
    assert answer.prompt.top_ids[1, 1] == answer.prompt.top_ids[2, 1]  # "other"
    assert one.form == "echo"


def test_a_server_with_neither_is_told_what_is_needed() -> None:
    def respond(body: dict[str, Any]) -> httpx2.Response:
        field = "echo" if "echo" in body else "prompt_logprobs"
        return httpx2.Response(400, json={"error": {"message": f"no {field} here"}})

    with pytest.raises(ChoraleError) as caught:
        scorer(respond).score((5, 9), 1)
    message = caught.value.message
    assert "parity needs /v1/completions with token ids" in message
    assert "no prompt_logprobs here" in message
    assert "no echo here" in message


def test_a_server_that_ignores_the_fields_is_no_basis() -> None:
    def respond(body: dict[str, Any]) -> httpx2.Response:
        return httpx2.Response(200, json={"choices": [{"text": "hello"}]})

    with pytest.raises(ChoraleError, match="echo with logprobs does not return the prompt's"):
        scorer(respond).score((5, 9), 1)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx2.Response(500, json={"error": {"message": "out of order"}}), "out of order"),
        (httpx2.Response(404, text="nothing here"), "HTTP 404: nothing here"),
        (httpx2.Response(200, text="<html>"), "not a completion with log-probabilities"),
        (httpx2.Response(200, json={"choices": []}), "not a completion with log-probabilities"),
    ],
)
def test_other_failures_have_the_servers_words(response: httpx2.Response, message: str) -> None:
    with pytest.raises(ChoraleError, match=message):
        scorer(lambda body: response).score((5, 9), 1)


def test_a_busy_server_is_asked_again() -> None:
    left = [429, 503]

    def respond(body: dict[str, Any]) -> httpx2.Response:
        return httpx2.Response(left.pop(), json={}) if left else by_ids(body)

    assert scorer(respond).score((5, 9), 1).greedy == (900,)
    assert not left


def test_texts_longer_than_the_server_takes_are_refused_first() -> None:
    with pytest.raises(ConfigError, match="takes at most 100 tokens, and the longest text needs 105"):
        measure(scorer(by_ids, longest=100), new_plan([20, 100], 1, 4, 2), lambda _: None, {})


def test_the_second_pass_scores_the_continuation_too() -> None:
    prompts: list[list[int]] = []

    def respond(body: dict[str, Any]) -> httpx2.Response:
        prompts.append(body["prompt"])
        return by_ids(body)

    done: list[int] = []
    found = measure(scorer(respond), new_plan([20, 30], 1, 3, 2), done.append, {"where": "here"})
    assert [len(one.again.token) for one in found.readings] == [23, 33]
    assert sorted(map(len, prompts)) == [20, 23, 30, 33]
    assert all(one.continuation == one.greedy == (900, 901, 902) for one in found.readings)
    assert found.about == {"where": "here", "form": "prompt_logprobs"}
    assert sum(done) == new_plan([20, 30], 1, 3, 2).num_tokens
