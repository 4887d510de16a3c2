"""Chat Completions over HTTP, in process: bodies, chunks, errors, and the OpenAI SDK."""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from chorale.engine.types import TokenLogprobs
from chorale.errors import EngineDeadError
from tests.support.scripted import (
    ANALYSIS,
    FINAL,
    NEXT,
    PREAMBLE,
    call,
    changing,
    events_of,
    fold_chat,
    ids,
    playing,
    scoring,
)
from tests.support.server import Server, served, with_server

ANSWER = ANALYSIS + "Think." + NEXT + FINAL + "Hello there.<|return|>"
CALLS = ANALYSIS + "Look." + NEXT + PREAMBLE + "One moment." + NEXT + call("f", '{"a": 1}') + "<|call|>"


async def both(server: Server, **fields: Any) -> tuple[Any, Any]:
    """Returns the body and the chunks of the same request."""
    return (await server.chat(**fields)).json(), events_of(await server.chat(stream=True, **fields))


def test_the_body_has_openais_form() -> None:
    body = with_server(playing(ANSWER, num_cached_tokens=16), lambda s: s.chat()).json()
    ChatCompletion.model_validate(body)
    assert body["object"] == "chat.completion"
    assert body["model"] == "demo"
    [choice] = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello there.",
        "refusal": None,
        "annotations": [],
        "reasoning": "Think.",
        "reasoning_content": "Think.",
    }
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    usage = body["usage"]
    assert usage["completion_tokens"] == len(ids(ANSWER))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_the_stream_has_openais_form() -> None:
    response = with_server(playing(ANSWER), lambda s: s.chat(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events_of(response)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    reasoning = [c["choices"][0]["delta"] for c in chunks if "reasoning" in c["choices"][0]["delta"]]
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in reasoning)
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }


async def test_legacy_functions_answer_with_function_call() -> None:
    async with served(playing(CALLS)) as server:
        body, chunks = await both(server, functions=[{"name": "f"}])
    assert body["choices"][0]["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    assert body["choices"][0]["finish_reason"] == "function_call"
    deltas = [c["choices"][0]["delta"].get("function_call") for c in chunks]
    assert "".join(d["arguments"] for d in deltas if d) == '{"a": 1}'
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert reasons == ["function_call"]


async def test_reasoning_can_be_hidden() -> None:
    async with served(playing(ANSWER)) as server:
        body, chunks = await both(server, include_reasoning=False)
    assert "reasoning" not in body["choices"][0]["message"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    assert fold_chat(chunks)[0]["reasoning"] == ""
    assert fold_chat(chunks)[0]["content"] == "Hello there."


async def test_a_stream_has_its_usage_at_the_end_or_in_every_chunk() -> None:
    async with served(playing(ANSWER)) as server:
        once = await server.chat(stream=True, stream_options={"include_usage": True})
        always = {"include_usage": True, "continuous_usage_stats": True}
        once, always = events_of(once), events_of(await server.chat(stream=True, stream_options=always))
    assert all(chunk["usage"] is None for chunk in once[:-1])
    assert once[-1]["choices"] == []
    assert once[-1]["usage"]["completion_tokens"] == len(ids(ANSWER))
    counts = [chunk["usage"]["completion_tokens"] for chunk in always if chunk["usage"]]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids(ANSWER))
    assert len(counts) == len(always)
    assert always[0]["usage"]["prompt_tokens"] == once[-1]["usage"]["prompt_tokens"]
    assert always[-1]["usage"] == once[-1]["usage"]


async def test_the_operator_can_enable_usage_and_token_ids_for_all_requests() -> None:
    async with served(playing(ANSWER, with_logprobs=True), force_usage=True, tokens_as_ids=True) as server:
        chat = events_of(await server.chat(stream=True))
        text = events_of(await server.complete(stream=True))
        scored = (await server.chat(logprobs=True)).json()
        declined = (await server.chat(logprobs=True, return_tokens_as_token_ids=False)).json()
    for chunks in (chat, text):
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
        assert chunks[-1]["choices"] == []
    tokens = [body["choices"][0]["logprobs"]["content"][0]["token"] for body in (scored, declined)]
    assert tokens == [f"token_id:{ids('Hello')[0]}", "Hello"]


async def test_choices_are_interleaved_and_independent() -> None:
    texts = [FINAL + "one two three four<|return|>", FINAL + "five six<|return|>"]
    async with served(playing(*texts)) as server:
        body, chunks = await both(server, n=2)
    assert [c["message"]["content"] for c in body["choices"]] == ["one two three four", "five six"]
    assert body["usage"]["completion_tokens"] == sum(len(ids(text)) for text in texts)
    folded = fold_chat(chunks)
    assert [folded[i]["content"] for i in (0, 1)] == ["one two three four", "five six"]
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)


async def test_logprobs_are_of_the_content_only() -> None:
    async with served(playing(ANSWER, with_logprobs=True)) as server:
        body, chunks = await both(server, logprobs=True, top_logprobs=1)
    ChatCompletion.model_validate(body)
    entries = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "Hello there."
    assert entries[0]["bytes"] == list(b"Hello")
    assert entries[0]["top_logprobs"] == [{"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}]
    assert fold_chat(chunks)[0]["logprobs"] == entries


async def test_named_tokens_are_scored_beside_the_actual_one() -> None:
    named, hello = ids("yes no"), ids("Hello")[0]

    def score(request: Any, chunk: Any) -> None:
        assert (request.sampling.logprobs, request.sampling.logprob_token_ids) == (0, tuple(named))
        chunk.logprobs = [TokenLogprobs(t, -0.5, 1, named, [-3.0, -20000.0]) for t in chunk.token_ids]

    async with served(changing(ANSWER, score)) as server:
        asked = {"logprobs": True, "logprob_token_ids": named, "return_tokens_as_token_ids": True}
        body = (await server.chat(**asked)).json()
        entries = body["choices"][0]["logprobs"]["content"]
        found = [(each["token"], each["logprob"]) for each in entries[0]["top_logprobs"]]
        places = zip([hello, *named], [-0.5, -3.0, -9999.0], strict=True)
        assert found == [(f"token_id:{token}", logprob) for token, logprob in places]
        raw = (await server.complete(logprobs=0, logprob_token_ids=named)).json()["choices"][0]
        assert {" no", "yes"} < raw["logprobs"]["top_logprobs"][0].keys()
        for answer in (
            await server.chat(logprob_token_ids=named),
            await server.complete(logprob_token_ids=[1]),
        ):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprob_token_ids")


async def test_the_ids_of_hidden_reasoning_are_not_returned() -> None:
    async with served(playing(ANSWER)) as server:
        body, chunks = await both(server, return_token_ids=True, include_reasoning=False)
    assert body["choices"][0]["token_ids"] is None
    assert body["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
    assert not any(choice.get("token_ids") for chunk in chunks for choice in chunk["choices"])


async def test_each_returned_token_id_has_a_logprob() -> None:
    """Training clients score all of ``token_ids``: reasoning, headers and the end too."""
    async with served(playing(ANSWER, with_logprobs=True)) as server:
        asked = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": True}
        body, chunks = await both(server, **asked)
        limited = (await server.chat(**asked, stop="there")).json()
        hidden = await both(server, **asked, include_reasoning=False)
    assert body["choices"][0]["token_ids"] == ids(ANSWER)
    assert body["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in ids(ANSWER)]
    for choice in [c for chunk in chunks for c in chunk["choices"]]:
        assert len((choice["logprobs"] or {"content": []})["content"]) == len(choice.get("token_ids", []))
    assert fold_chat(chunks)[0]["logprobs"] == entries
    [choice] = limited["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) < len(entries)
    for found in (hidden[0]["choices"][0]["logprobs"]["content"], fold_chat(hidden[1])[0]["logprobs"]):
        assert [entry["token"] for entry in found] == [f"token_id:{token}" for token in ids("Hello there.")]


async def test_the_stop_reason_is_the_stop_string() -> None:
    async with served(playing(ANSWER)) as server:
        body, chunks = await both(server, stop=["there"])
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("Hello ", "there")
    assert fold_chat(chunks)[0]["stop_reason"] == "there"


def test_the_body_has_prompt_logprobs_on_request() -> None:
    body = with_server(scoring(ANSWER), lambda s: s.chat(prompt_logprobs=1)).json()
    scored = body["prompt_logprobs"]
    assert scored[0] is None
    assert len(scored) == body["usage"]["prompt_tokens"]
    assert scored[1]["7"] == {"logprob": -0.5, "rank": 1, "decoded_token": "("}


# --------------------------------------------------------------------------- errors


def test_an_error_before_the_first_chunk_is_a_status() -> None:
    async def both(server: Server) -> tuple[Any, Any]:
        return await server.chat(), await server.chat(stream=True)

    for response in with_server(playing("", error=EngineDeadError("gone", retry_after=2)), both):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_restarted"
        assert response.headers["retry-after"] == "2"


def test_an_error_in_the_stream_is_an_event_then_done() -> None:
    client = playing(FINAL + "partial", error=EngineDeadError("gone"))
    chunks = events_of(with_server(client, lambda s: s.chat(stream=True)))
    assert chunks[-1]["error"]["code"] == "engine_restarted"
    assert fold_chat(chunks[:-1])[0]["content"] == "partial"
    assert "finish_reason" not in fold_chat(chunks[:-1])[0]
    assert with_server(client, lambda s: s.chat()).status_code == 503


def test_an_aborted_request_is_503() -> None:
    client = playing(FINAL + "x", finish_reason="abort")
    response = with_server(client, lambda s: s.chat())
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "aborted"


# --------------------------------------------------------------------------- the SDK


async def test_the_sdk_orders_choices_regardless_of_which_starts_first() -> None:
    late = "<|channel|>commentary to=nobody"  # a header that is longer than the others
    texts = (late + "<|message|>One.", late + FINAL + "Two.", FINAL + "Three.")
    async with served(playing(*[text + "<|return|>" for text in texts])) as server:
        messages: Any = [{"role": "user", "content": "hi"}]
        async with server.sdk.chat.completions.stream(model="demo", messages=messages, n=3) as stream:
            completion = await stream.get_final_completion()
        assert [choice.message.content for choice in completion.choices] == ["One.", "Two.", "Three."]
