"""State over real connections, with the SDK's synchronous client and a real engine."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.support.served import Served

ASK: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def poll(client: openai.OpenAI, response: Response) -> Response:
    deadline = time.monotonic() + 30
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        response = client.responses.retrieve(response.id)
    return response


def test_background_is_polled(served: Served) -> None:
    client = served.client()
    ask = {**ASK, "input": "Tell me more.", "max_output_tokens": 40}
    made = client.responses.create(**ask, background=True)
    assert made.status == "queued"
    ended = poll(client, made)
    plain = client.responses.create(**ask)
    assert (ended.status, ended.output_text) == (plain.status, plain.output_text)
    assert ended.usage is not None
    assert plain.usage is not None
    assert ended.usage.output_tokens == plain.usage.output_tokens == 40


def test_a_stream_that_broke_is_resumed_on_another_connection(served: Served) -> None:
    ask = {**ASK, "input": "Go on and on.", "max_output_tokens": 200}
    stream = served.client().responses.create(**ask, background=True, stream=True)
    first = []
    for event in stream:
        first.append(event)
        if len(first) == 12:
            break
    stream.close()  # the connection is gone
    response_id, number = first[0].response.id, first[-1].sequence_number
    client = served.client()
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=number))
    numbers = [event.sequence_number for event in (*first, *rest)]
    assert numbers == list(range(len(numbers)))
    whole = list(client.responses.retrieve(response_id, stream=True))
    assert [event.to_dict() for event in whole] == [event.to_dict() for event in (*first, *rest)]
    assert whole[-1].response == client.responses.retrieve(response_id)  # type: ignore[union-attr]
    assert sum(len(getattr(event, "delta", "")) for event in rest) > 0


def test_cancel_frees_the_engine(served: Served) -> None:
    client = served.client()
    made = client.responses.create(**ASK, input="Never stop.", max_output_tokens=100_000, background=True)
    served.wait_until("it runs", lambda: client.responses.retrieve(made.id).status == "in_progress")
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(made.id) == cancelled
    served.wait_until("the engine is idle", lambda: served.metric("vllm:num_requests_running") == 0)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(client.responses.create(**ASK, input="x", max_output_tokens=1).id)


def test_a_conversation_reuses_its_prefix(served: Served) -> None:
    """Turn two begins with the tokens of turn one, so that most of its prompt is cached."""
    client = served.client()
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "Remember: " + "the sea is blue. " * 40}]
    )
    first = client.responses.create(
        **ASK, input="Say something.", max_output_tokens=30, conversation=conversation.id
    )
    second = client.responses.create(
        **ASK, input="And more?", max_output_tokens=5, conversation=conversation.id
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.conversation is not None
    assert second.conversation.id == conversation.id
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 32
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert len(items) == 3 + len(first.output) + len(second.output)
    client.conversations.delete(conversation.id)
