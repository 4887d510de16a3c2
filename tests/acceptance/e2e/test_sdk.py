"""The unmodified OpenAI SDK against a running server: every call that issue-level acceptance names.

The model is random: streams, lengths, errors, probabilities must hold for noise. Answers: ``test_demo.py``.
"""

from __future__ import annotations

import concurrent.futures
import json

import openai
import pytest

from tests.support.served import Served

MODEL = "tiny"


def test_stored_responses_go_on(served: Served) -> None:
    client = served.client()
    first = client.responses.create(model=MODEL, input="My name is Ada.", max_output_tokens=8)
    assert client.responses.retrieve(first.id).id == first.id
    second = client.responses.create(
        model=MODEL, input="And yours?", previous_response_id=first.id, max_output_tokens=8
    )
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_completions(served: Served) -> None:
    client = served.client()
    ask = {
        "model": MODEL,
        "prompt": ["one two", [17, 25, 40]],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 2,
    }
    body = client.completions.create(**ask)  # type: ignore[call-overload]
    assert len(body.choices) == 2
    assert all(len(choice.logprobs.token_logprobs) == 6 for choice in body.choices)
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**ask, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in body.choices] == [texts[0], texts[1]]


def test_scoring_a_prompt(served: Served) -> None:
    """What evaluation harnesses do: echo, no new tokens, log-probabilities of the prompt."""
    scored = served.client().completions.create(
        model=MODEL, prompt="a b c d e", max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert scored.choices[0].text == "a b c d e"


def test_the_same_seed_gives_the_same_answer_among_others(served: Served) -> None:
    client = served.client()

    def ask() -> str:
        body = client.completions.create(model=MODEL, prompt="hello", max_tokens=12, temperature=1, seed=11)
        return body.choices[0].text

    alone = ask()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(
                client.completions.create, model=MODEL, prompt=f"other {i}", max_tokens=20, temperature=1
            )
            for i in range(7)
        ]
        assert pool.submit(ask).result() == alone
        assert all(other.result() for other in others)


def test_a_long_prompt_is_cut_by_chunks_and_found_again(served: Served) -> None:
    client = served.client()
    prompt = " ".join(f"word{i}" for i in range(1500))
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    again = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 2000


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model_not_found"),
        ({"prompt": [-1]}, openai.BadRequestError, None),
        ({"prompt": [201088]}, openai.BadRequestError, None),
        ({"prompt": "word " * 200_000}, openai.BadRequestError, "context_length_exceeded"),
        ({"temperature": 3}, openai.BadRequestError, None),
        ({"n": 0}, openai.BadRequestError, None),
        ({"max_tokens": -1}, openai.BadRequestError, None),
        ({"suffix": "x"}, openai.BadRequestError, None),
    ],
)
def test_mistakes_are_the_clients(
    served: Served, changes: dict[str, object], error: type[openai.APIStatusError], code: str | None
) -> None:
    ask = {"model": MODEL, "prompt": "x", "max_tokens": 1} | changes
    with pytest.raises(error) as caught:
        served.client().completions.create(**ask)  # type: ignore[call-overload]
    found = caught.value.body
    assert isinstance(found, dict)
    assert set(found) >= {"message", "type", "param", "code"}
    assert isinstance(found["code"], str)
    if code is not None:
        assert found["code"] == code


def test_errors_before_a_stream_are_plain_json(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        served.client().chat.completions.create(
            model="nope", messages=[{"role": "user", "content": "x"}], stream=True
        )


def test_raw_events_are_well_formed(served: Served) -> None:
    client = served.client()
    with client.responses.with_streaming_response.create(
        model=MODEL, input="x", stream=True, max_output_tokens=5
    ) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in ("response.completed", "response.incomplete")


def test_responses_over_a_websocket_are_those_of_http(served: Served) -> None:
    client = served.client()
    ask = {"model": MODEL, "input": "Say something.", "temperature": 0.0, "max_output_tokens": 24}
    expected = [part["text"] for part in parts(client.responses.create(**ask).model_dump())]  # type: ignore[call-overload]
    with client.responses.connect() as connection:
        previous: dict[str, str] = {}
        asked: list[int] = []
        for turn in range(3):
            connection.response.create(**ask, store=False, **previous)
            for event in connection:
                if event.type in ("response.completed", "response.incomplete", "error"):
                    break
            assert event.type != "error", event
            found = event.response.model_dump()
            if turn == 0:
                assert [part["text"] for part in parts(found)] == expected
            asked.append(found["usage"]["input_tokens"])
            previous = {"previous_response_id": found["id"]}
    assert asked == sorted(set(asked))  # each turn has the turns before it


def parts(response: dict[str, object]) -> list[dict[str, str]]:
    return [part for item in response["output"] for part in item.get("content") or []]  # type: ignore[attr-defined]
