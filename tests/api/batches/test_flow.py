"""Files and batches as OpenAI's SDK uses them: upload, create, poll, read; cancel, expiry, errors."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch, FileObject
from pydantic import TypeAdapter

from chorale.config.engine import hash_key
from tests.support.engine.scripted_client import HELLO, Script, ScriptedClient
from tests.support.event_loop import until
from tests.support.scripted import scripted
from tests.support.server import VOCAB, Server, served

STRICT_BATCH = TypeAdapter(Batch)
CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body: Any) -> bytes:
    body = body or {"messages": [{"role": "user", "content": f"number {number}"}]}
    return json.dumps({"custom_id": f"n{number}", "method": "POST", "url": url, "body": body}).encode()


def batched(folder: Path, client: Any = None, **options: Any) -> AbstractAsyncContextManager[Server]:
    """Starts a server that keeps files in ``folder``."""
    return served(client, response_store=str(folder / "store.sqlite3"), **options)


async def upload(server: Server, *lines: bytes, **more: Any) -> FileObject:
    return await server.sdk.files.create(
        file=("in put.jsonl", b"\n".join(lines)), **{"purpose": "batch", **more}
    )


async def created(server: Server, *lines: bytes, endpoint: Any = CHAT, **more: Any) -> Any:
    file = await upload(server, *lines)
    return await server.sdk.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


async def ended(server: Server, batch: Any) -> Any:
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        await asyncio.sleep(0.01)
        answer = await server.http.get(f"/v1/batches/{batch.id}")
        STRICT_BATCH.validate_json(answer.content, strict=True)
        batch = await server.sdk.batches.retrieve(batch.id)
    return batch


async def records(server: Server, file_id: str) -> list[dict[str, Any]]:
    content = await server.sdk.files.content(file_id)
    return [json.loads(text) for text in content.text.splitlines()]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "One, two,"}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_openais_sdk_runs_a_batch(tmp_path: Path, endpoint: Any, body: dict[str, Any]) -> None:
    async with batched(tmp_path) as server:
        lines = [line(number, endpoint, **body) for number in range(20)]
        lines.insert(7, line(99, endpoint, **body, temperature=-1))
        batch = await created(server, *lines, endpoint=endpoint, metadata={"of": "sums"})
        assert (batch.status, batch.metadata) == ("validating", {"of": "sums"})
        batch = await ended(server, batch)
        assert batch.status == "completed", batch
        assert batch.request_counts.to_dict() == {"total": 21, "completed": 20, "failed": 1}
        found = await records(server, batch.output_file_id)
        assert [each["custom_id"] for each in found] == [f"n{number}" for number in range(20)]
        assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in found)
        used = [each["response"]["body"]["usage"] for each in found]
        assert batch.usage.total_tokens == sum(each["total_tokens"] for each in used) > 0
        (failed,) = await records(server, batch.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("n99", 400)
        assert failed["response"]["body"]["error"]["param"] == "temperature"
        times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
        assert times == sorted(times)
        file = await server.sdk.files.retrieve(batch.output_file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        assert file.bytes == len((await server.sdk.files.content(file.id)).content)


async def test_batch_lines_are_marked_for_the_engine_and_counted_separately(tmp_path: Path) -> None:
    async with batched(tmp_path) as server:
        await ended(server, await created(server, line(1), line(2)))
        assert [request.is_batch for request in server.client.requests] == [True, True]
        await server.chat()
        assert not server.client.requests[-1].is_batch
        metrics = (await server.http.get("/metrics")).text
        assert 'chorale:batch_lines_total{engine="0",model_name="demo",status="completed"} 2.0' in metrics
        assert (
            'vllm:request_success_total{engine="0",finished_reason="stop",model_name="demo"} 1.0' in metrics
        )
        assert 'chorale:batches{engine="0",model_name="demo",status="in_progress"} 0.0' in metrics
        assert "chorale:files{" in metrics


FAULTS = [
    (b"", "empty_file", None),
    (b"\n \n", "empty_file", None),
    (b"{", "invalid_json_line", 1),
    (b"{\n" * 1000, "invalid_json_line", 1),
    (line(1) + b"\n\n" + line(1), "duplicate_custom_id", 3),
    (line(1, "/v1/completions"), "invalid_url", 1),
    (b"\n".join(map(line, range(2001))), "too_many_tasks", None),
    (line(1, prompt="x" * 70_000), "line_too_large", 1),
]


@pytest.mark.parametrize(("content", "code", "number"), FAULTS)
async def test_an_invalid_input_file_fails_with_the_line_number(
    tmp_path: Path, content: bytes, code: str, number: int | None
) -> None:
    async with batched(tmp_path, batch_max_lines=2000, max_body_bytes=65_536) as server:
        batch = await ended(server, await created(server, content))
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        assert batch.errors.object == "list"
        assert len(batch.errors.data) == min(100, content.count(b"{\n") or 1)
        assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
        assert batch.failed_at is not None
        assert not server.client.requests


async def test_a_cancelled_batch_has_answers_and_errors_for_all_lines(tmp_path: Path) -> None:
    def script(request: Any, index: int) -> Script:
        number = int(VOCAB.decode(request.prompt_token_ids).split("number ")[1].split("<")[0])
        return Script(HELLO, hang=number >= 5)

    async with batched(tmp_path, ScriptedClient(script)) as server:
        batch = await created(server, *map(line, range(12)))
        while (batch.request_counts is None) or batch.request_counts.completed < 5:
            batch = await server.sdk.batches.retrieve(batch.id)
            await asyncio.sleep(0.01)
        asked = await server.sdk.batches.cancel(batch.id)
        assert asked.status == "cancelling"
        assert asked.cancelling_at
        batch = await ended(server, asked)
        assert batch.status == "cancelled"
        assert batch.cancelled_at
        output = await records(server, batch.output_file_id)
        errors = await records(server, batch.error_file_id)
        assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
        assert sorted(each["custom_id"] for each in output + errors) == sorted(f"n{i}" for i in range(12))
        assert len(output) == 5
        assert batch.request_counts.to_dict() == {"total": 12, "completed": 5, "failed": 7}
        with pytest.raises(openai.ConflictError):
            await server.sdk.batches.cancel(batch.id)
        assert server.client.num_in_flight == 0


async def test_a_draining_server_leaves_its_batch_to_the_next_server(tmp_path: Path) -> None:
    async with batched(tmp_path, scripted(delay=0.02), batch_max_concurrency=4) as server:
        batch = await created(server, *map(line, range(40)))
        runner = server.runner
        await until(lambda: len(server.client.requests) >= 4)
        server.state.lifecycle.draining = True
        runner.leave()
        async with asyncio.timeout(10):
            await runner.drain()  # the lines in flight are answered
        left: Any = await server.sdk.batches.retrieve(batch.id)
        assert left.status == "in_progress"
        assert left.request_counts.completed == len(server.client.requests) < 40
        num_sent = len(server.client.requests)
    async with batched(tmp_path) as server:
        batch = await ended(server, batch)
        assert len(server.client.requests) == 40 - num_sent  # no line twice
        found = await records(server, batch.output_file_id)
        assert [each["custom_id"] for each in found] == [f"n{number}" for number in range(40)]


async def test_an_expired_batch_lists_its_unanswered_lines(tmp_path: Path) -> None:
    async with batched(tmp_path, scripted(hang=True)) as server:
        batch = await created(server, *map(line, range(4)))
        await until(lambda: server.client.requests)
        now = server.store.batches._access.clock
        server.store.batches._access.clock = lambda: now() + 86_401
        server.batches.wake()
        batch = await ended(server, batch)
        assert batch.status == "expired"
        assert batch.expired_at
        assert batch.output_file_id is None
        errors = await records(server, batch.error_file_id)
        assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 4
        assert all(each["response"] is None for each in errors)


async def test_files_and_batches_are_visible_only_to_their_key(tmp_path: Path) -> None:
    async with batched(tmp_path, keys=[hash_key("one"), hash_key("two")], api_key="one") as server:
        other = server.sdk.with_options(api_key="two")
        batch = await ended(server, await created(server, line(1, "/v1/responses", input="hi"),
                                                  endpoint="/v1/responses"))  # fmt: skip
        (record,) = await records(server, batch.output_file_id)
        # The stored response of a line belongs to the batch's owner.
        answer = record["response"]["body"]["id"]
        assert (await server.sdk.responses.retrieve(answer)).id == answer
        for call in (
            other.responses.retrieve(answer),
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.output_file_id),
            other.files.delete(batch.input_file_id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert not (await other.files.list()).data
        assert not (await other.batches.list()).data
        assert len((await server.sdk.files.list()).data) == 2


async def test_lists_are_paged_and_filtered(tmp_path: Path) -> None:
    async with batched(tmp_path, unknown_fields="refuse") as server:
        files = [(await upload(server, line(1))).id for _ in range(5)]
        data = await upload(server, b"anything", purpose="user_data")
        assert data.expires_at is None
        found = [each.id async for each in server.sdk.files.list(limit=2, order="asc", purpose="batch")]
        assert found == files
        assert [each.id async for each in server.sdk.files.list(limit=4)] == [data.id, *reversed(files)]
        batches = [
            (await server.sdk.batches.create(input_file_id=each, endpoint=CHAT, completion_window="24h")).id
            for each in files
        ]
        assert [each.id async for each in server.sdk.batches.list(limit=2)] == batches[::-1]
        for path in ("/v1/files?limit=0", "/v1/files?order=up", "/v1/batches?limit=101", "/v1/files?x=1",
                     "/v1/batches?after=batch_1", "/v1/files?after=file-1"):  # fmt: skip
            assert (await server.http.get(path)).status_code == 400, path


async def test_deleting_a_file_deletes_its_content(tmp_path: Path) -> None:
    async with batched(tmp_path) as server:
        file = await upload(server, line(1))
        folder = tmp_path / "store.sqlite3.files"
        assert [path.name for path in folder.iterdir()] == [file.id]
        assert (await server.sdk.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await server.sdk.files.retrieve(file.id)
        await server.runner.sweep()
        assert not list(folder.iterdir())


async def test_the_input_of_a_running_batch_cannot_be_deleted(tmp_path: Path) -> None:
    async with batched(tmp_path, scripted(hang=True)) as server:
        batch = await created(server, line(1))
        with pytest.raises(openai.ConflictError) as caught:
            await server.sdk.files.delete(batch.input_file_id)
        assert caught.value.code == "file_in_use"


async def test_errors_of_batch_bodies_name_the_field(tmp_path: Path) -> None:
    async with batched(tmp_path, unknown_fields="refuse") as server:
        file = await upload(server, line(1))
        good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for change, param in (
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "1 day"}, "completion_window"),
            ({"completion_window": "721h"}, "completion_window"),
            ({"input_file_id": 1}, "input_file_id"),
            ({"metadata": {"a": 1}}, "metadata.a"),
            (
                {"output_expires_after": {"anchor": "created_at", "seconds": 60}},
                "output_expires_after.seconds",
            ),
            ({"priority": 1}, "priority"),
        ):
            answer = await server.http.post("/v1/batches", json={**good, **change})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        answer = await server.http.post("/v1/batches", json={**good, "input_file_id": "file-1"})
        assert answer.status_code == 404
        data = await upload(server, line(1), purpose="user_data")
        answer = await server.http.post("/v1/batches", json={**good, "input_file_id": data.id})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_file_purpose")


async def test_files_are_disabled_without_a_persistent_store() -> None:
    async with served(None) as server:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches/batch_1")):
            answer = await server.http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "files_disabled")
