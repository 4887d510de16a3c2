"""Completions over HTTP, in process: raw prompts, raw text, scoring, several prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion

from chorale.errors import EngineDeadError
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.scripted import ANALYSIS, FINAL, events_of, ids, playing, scoring
from tests.support.server import VOCAB, Server, served, with_server

RAW = ANALYSIS + "Hm.<|end|><|start|>assistant" + FINAL + "Hello there.<|return|>"


def fold_text(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            state = choices.setdefault(choice["index"], {"text": "", "logprobs": None})
            state["text"] += choice["text"]
            for key, values in (choice["logprobs"] or {}).items():
                state["logprobs"] = state["logprobs"] or {}
                state["logprobs"].setdefault(key, []).extend(values)
            if choice["finish_reason"]:
                state["finish_reason"] = choice["finish_reason"]
                state["stop_reason"] = choice["stop_reason"]
    return choices


async def both(server: Server, prompt: Any = "hi", **fields: Any) -> tuple[Any, dict[int, dict[str, Any]]]:
    """Returns the body and the folded stream of the same request; asserts that they agree."""
    response = await server.complete(prompt, **fields)
    assert response.status_code == 200, response.text
    body = response.json()
    if not fields.get("echo"):  # the first logprob is null, which the SDK's types do not allow
        Completion.model_validate(body)
    options = {"include_usage": True}
    chunks = events_of(await server.complete(prompt, stream=True, stream_options=options, **fields))
    folded = fold_text(chunks)
    assert chunks[-1]["usage"] == body["usage"]
    for choice in body["choices"]:
        same = {k: choice[k] for k in ("text", "logprobs", "finish_reason", "stop_reason")}
        if same["logprobs"] is not None and not same["logprobs"]["tokens"]:
            same["logprobs"] = None  # a stream sends no chunk without tokens
        assert folded[choice["index"]] == same
    return body, folded


def test_text_is_raw_and_special_tokens_are_left_out() -> None:
    body, _ = with_server(playing(RAW), lambda s: both(s))
    assert body["object"] == "text_completion"
    [choice] = body["choices"]
    assert choice["text"] == "analysisHm.assistantfinalHello there."
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert body["usage"]["completion_tokens"] == len(ids(RAW))


@pytest.mark.parametrize("n", [1, 2])
async def test_the_first_chunk_comes_with_the_first_token_even_without_text(n: int) -> None:
    async with served(playing("<|start|>a b<|return|>")) as server:
        chunks = events_of(await server.complete("hi", stream=True, n=n))
    for index in range(n):
        texts = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert texts == ["", "a", " b", ""]


def test_special_tokens_can_be_kept() -> None:
    body, _ = with_server(playing(RAW), lambda s: both(s, skip_special_tokens=False))
    assert body["choices"][0]["text"] == RAW


async def test_text_prompts_may_contain_special_tokens() -> None:
    async with served(playing(RAW)) as server:
        await server.complete("<|start|>user<|message|>hi<|end|><|start|>assistant")
        assert server.prompt_ids() == [200006, 1428, 200008, 3686, 200007, 200006, 173781]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [[3686]]),
        (["hi", "hi hi"], [[3686], VOCAB.encode("hi hi")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["hi", [7]], [[3686], [7]]),
    ],
)
async def test_prompts_may_be_text_or_ids_or_lists_of_them(prompt: Any, expected: list[list[int]]) -> None:
    async with served(playing(RAW)) as server:
        body, _ = await both(server, prompt)
        sent = sorted(r.prompt_token_ids for r in server.client.requests[: len(expected)])
        assert sent == sorted(expected)
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([5, -1], "prompt[1]"),
        ([[5], [201088]], "prompt[1][0]"),
        ([5, True], "prompt[0]"),
        ([5, "a"], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ({"a": 1}, "prompt"),
        (["a"] * 257, "prompt"),
    ],
)
def test_errors_of_invalid_prompts_name_their_path(prompt: Any, param: str) -> None:
    response = with_server(playing(RAW), lambda s: s.complete(prompt))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"response_format": {"type": "xml"}}, "response_format", "unsupported_value"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "unsupported_parameter"),
        ({"messages": []}, "messages", "unknown_parameter"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_parameter"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, code: str) -> None:
    response = with_server(playing(RAW), lambda s: s.complete("hi", **fields), unknown_fields="refuse")
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, code)


async def test_the_server_limits_logprobs() -> None:
    client = playing(RAW)
    client.info_value = msgspec.structs.replace(client.info_value, max_logprobs=3)
    async with served(client) as server:
        for response, param in (
            (await server.complete(logprobs=4), "logprobs"),
            (await server.complete(prompt_logprobs=4), "prompt_logprobs"),
            (await server.chat(logprobs=True, top_logprobs=4), "top_logprobs"),
        ):
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        assert (await server.complete(logprobs=3)).status_code == 200


async def test_defaults_apply_and_the_window_limits_lengths() -> None:
    async with served(playing(RAW)) as server:
        await server.complete("hi", best_of=2, n=2, ignore_eos=True, suffix="")
        sampling = server.client.requests[-1].sampling
        assert (sampling.max_tokens, sampling.n, sampling.ignore_eos) == (16, 2, True)
        await server.complete("hi", max_tokens=10**6)
        assert server.client.requests[-1].sampling.max_tokens == 131072 - 1
        response = await server.complete([5] * 131072)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert response.json()["error"]["param"] == "prompt"


def test_choices_of_several_prompts_are_numbered_in_order() -> None:
    def source(request: Any, index: int) -> Script:
        return Script(ids(f"{VOCAB.decode(request.prompt_token_ids)} {index}<|return|>"))

    body, _ = with_server(ScriptedClient(source), lambda s: both(s, ["a", "b"], n=2))
    assert [choice["text"] for choice in body["choices"]] == ["a 0", "a 1", "b 0", "b 1"]


async def test_stop_strings_end_the_text_after_min_tokens() -> None:
    async with served(playing(RAW)) as server:
        body, _ = await both(server, stop=["there"])
        assert body["choices"][0]["text"].endswith("Hello ")
        assert body["choices"][0]["stop_reason"] == "there"
        body, _ = await both(server, stop="there", include_stop_str_in_output=True)
        assert body["choices"][0]["text"].endswith("Hello there")
        for min_tokens, stop in ((0, "Hm"), (3, "Hm"), (4, "there")):  # "Hm" is the fourth token
            body, _ = await both(server, stop=["Hm", "there"], min_tokens=min_tokens)
            assert body["choices"][0]["stop_reason"] == stop


def test_logprobs_have_the_text_offsets_of_their_tokens() -> None:
    body, _ = with_server(
        playing("Hé 🧑‍🚀 there<|return|>", with_logprobs=True), lambda s: both(s, logprobs=1)
    )
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "Hé 🧑‍🚀 there"
    assert len(logprobs["tokens"]) == len(ids(choice["text"]))
    assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
    assert logprobs["text_offset"][0] == 0
    assert choice["text"][logprobs["text_offset"][-1] :] == " there"
    assert logprobs["top_logprobs"][-1] == {" there": -0.5}


@pytest.mark.parametrize("stop", [{}, {"stop_token_ids": ids(" there")}, {"stop": "there"}])
def test_with_token_ids_each_token_has_a_logprob(stop: dict[str, Any]) -> None:
    client = playing("Hé 🧑‍🚀 there<|return|>", with_logprobs=True)
    body, _ = with_server(client, lambda s: both(s, logprobs=1, return_token_ids=True, **stop))
    choice = body["choices"][0]
    tokens = [VOCAB.decode([token]) for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == tokens


async def test_echo_scores_the_prompt_without_answering() -> None:
    async with served(scoring("x")) as server:
        prompt = "one two three"
        body, _ = await both(server, prompt, echo=True, max_tokens=0, logprobs=1)
        choice = body["choices"][0]
        assert choice["text"] == prompt
        assert choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["one", " two", " three"]
        assert logprobs["token_logprobs"] == [None, -1.0, -1.0]
        assert logprobs["top_logprobs"][1] == {" two": -1.0, "(": -0.5}
        assert logprobs["text_offset"] == [0, 3, 7]
        assert body["usage"]["completion_tokens"] == 0
        request = server.client.requests[-1]
        assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (1, 1)


async def test_echo_puts_the_text_of_prompt_ids_before_the_answer() -> None:
    async with served(scoring(" three<|return|>", with_logprobs=True)) as server:
        body, _ = await both(server, ids("one two"), echo=True, logprobs=0)
        choice = body["choices"][0]
        assert choice["text"] == "one two three"
        assert choice["logprobs"]["tokens"] == ["one", " two", " three"]
        assert choice["logprobs"]["text_offset"] == [0, 3, 7]
        assert choice["logprobs"]["top_logprobs"][1] == {" two": -1.0}


async def test_prompt_logprobs_and_token_ids_are_returned_on_request() -> None:
    async with served(scoring(RAW)) as server:
        body = (await server.complete("one two", prompt_logprobs=1, return_token_ids=True)).json()
        choice = body["choices"][0]
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1][str(ids(" two")[0])]["rank"] == 2
        assert choice["prompt_token_ids"] == ids("one two")
        assert choice["token_ids"] == ids(RAW)
        chunks = events_of(await server.complete("one two", stream=True, return_token_ids=True))
        streamed = [token for c in chunks for choice in c["choices"] for token in choice["token_ids"]]
        assert streamed == ids(RAW)


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}])
async def test_a_stream_names_the_tokens_of_each_prompt_once(fields: dict[str, Any]) -> None:
    async with served(playing(RAW)) as server:
        asked = {"n": 2, "return_token_ids": True, **fields}
        prompts = ["one two", "three"]
        body = (await server.complete(prompts, **asked)).json()
        chunks = events_of(await server.complete(prompts, stream=True, **asked))
        firsts: dict[int, Any] = {}
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            assert ("prompt_token_ids" in choice) == (choice["index"] not in firsts)
            firsts.setdefault(choice["index"], choice)
        named = {index: choice["prompt_token_ids"] for index, choice in firsts.items()}
        assert named == {choice["index"]: choice["prompt_token_ids"] for choice in body["choices"]}


async def test_each_chunk_has_the_usage_so_far_on_request() -> None:
    async with served(playing(RAW)) as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events_of(await server.complete("hi", stream=True, stream_options=options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids(RAW))


class Losing(ScriptedClient):
    """Loses the engine before the first token of the prompt [6]."""

    async def _play(self, request: Any, index: int, stream: Any) -> None:
        if request.prompt_token_ids == [6]:
            await asyncio.sleep(0.05)
            stream.fail(EngineDeadError("gone"))
        else:
            await super()._play(request, index, stream)


async def test_a_prompt_that_cannot_begin_ends_the_stream_of_all() -> None:
    async with served(Losing(lambda request, index: Script(ids("Hello"), hang=True))) as server:
        chunks = events_of(await server.complete([[5], [6]], stream=True))
        assert chunks[0]["choices"][0]["text"] == "Hello"
        assert chunks[-1]["error"]["code"] == "engine_restarted"
        assert (await server.complete([[5], [6]])).status_code == 503
        assert len(server.client.aborted) == 2


class Dying(ScriptedClient):
    """Its engine dies before it gets the prompt [6]."""

    def submit(self, request: Any) -> Any:
        if request.prompt_token_ids == [6]:
            raise EngineDeadError("gone")
        return super().submit(request)


async def test_what_was_reserved_for_prompts_that_never_began_is_released() -> None:
    async with served(Dying(lambda request, index: Script(ids("Hello"), hang=True))) as server:
        assert (await server.complete([[5], [6]])).status_code == 503
        assert not server.client.reserved


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, 201087), max_size=30),
    st.integers(1, 64),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([None, 0, 1]),
    st.booleans(),
)
def test_the_folded_stream_equals_the_body(
    tokens: list[int], step: int, interval: int, skip: bool, logprobs: int | None, echo: bool
) -> None:
    client = ScriptedClient(
        lambda request, index: Script(tokens, tokens_per_step=step, with_logprobs=logprobs is not None)
    )
    fields = {"skip_special_tokens": skip, "logprobs": logprobs, "echo": echo, "stop": ["e"]}
    with_server(client, lambda s: both(s, "hi", **fields), stream_interval=interval)
