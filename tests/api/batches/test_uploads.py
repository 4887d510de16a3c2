"""Uploads: size checks before reading, quotas, malformed forms, file names, disconnects."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from chorale.api.files.endpoint import MAX_UPLOADS
from chorale.config.engine import hash_key
from tests.api.batches.test_flow import batched, created, ended, line, records, upload
from tests.support.event_loop import until
from tests.support.server import Server, served

HEAD = {"content-type": "multipart/form-data; boundary=cut"}


def part(name: str, content: bytes = b"", more: str = "") -> bytes:
    return (
        f'--cut\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"
    )


PURPOSE, END = part("purpose", b"batch"), b"--cut--\r\n"
FILE = part("file", b"{}", '; filename="a.jsonl"')
MALFORMED: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_form"),
    (b"nothing of a form", 400, "invalid_form"),
    (PURPOSE + FILE, 400, "invalid_form"),  # ends early
    (FILE[:-4], 400, "invalid_form"),
    (PURPOSE + END, 400, "missing_required_parameter"),
    (FILE + END, 400, "missing_required_parameter"),
    (PURPOSE + PURPOSE + FILE + END, 400, "invalid_form"),
    (PURPOSE + FILE + FILE + END, 400, "invalid_form"),
    (part("purpose", b"vision") + FILE + END, 400, "unsupported_value"),
    (part("purpose", b"other") + FILE + END, 400, "invalid_value"),
    (part("color", b"red") + PURPOSE + FILE + END, 400, "unknown_parameter"),
    (part("purpose", b"x" * 5000) + FILE + END, 400, "invalid_form"),
    (b"".join(part(f"f{index}") for index in range(17)) + END, 400, "invalid_form"),
    (b"--cut\r\n" + b"a: b\r\n" * 20 + b"\r\n\r\n" + END, 400, "invalid_form"),
    (b"--cut\r\na: " + b"b" * 9000 + b"\r\n\r\n\r\n" + END, 400, "invalid_form"),
    (PURPOSE + part("file", b"x" * 200_001, '; filename="a"') + END, 413, "file_too_large"),
    (PURPOSE + part("expires_after[seconds]", b"60") + FILE + END, 400, "missing_required_parameter"),
    (part("expires_after", b"x") + part("expires_after[seconds]", b"60") + FILE + END, 400, "invalid_form"),
]


@pytest.mark.parametrize(("body", "status", "code"), MALFORMED)
async def test_a_malformed_form_is_refused_and_leaves_no_file(
    tmp_path: Path, body: bytes, status: int, code: str
) -> None:
    async with batched(
        tmp_path, batch_max_file_bytes=200_000, batch_max_files=1, unknown_fields="refuse"
    ) as server:
        answer = await server.http.post("/v1/files", content=body, headers=HEAD)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        assert not (await server.sdk.files.list()).data
        await upload(server, line(1))  # the quota of one file is free again


async def uploading(server: Server, count: int) -> None:
    uploads = server.batches.uploads  # type: ignore[union-attr]
    await until(lambda: uploads.total >= count)


async def test_bodies_of_other_types_are_refused(tmp_path: Path) -> None:
    async with batched(tmp_path) as server:
        for kind, status in (("application/json", 415), ("multipart/form-data", 400), ("", 415)):
            answer = await server.http.post("/v1/files", content=b"{}", headers={"content-type": kind})
            assert answer.status_code == status, kind


async def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with batched(tmp_path, batch_max_file_bytes=200_000) as server:
        headers = HEAD | {"content-length": str(2**30)}
        answer = await server.http.post("/v1/files", content=PURPOSE, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


async def test_quotas_limit_each_key_and_the_server(tmp_path: Path) -> None:
    quotas = {"batch_max_files": 3, "batch_max_bytes": 100_000, "batch_max_total_bytes": 120_000}
    async with batched(
        tmp_path, keys=[hash_key(key) for key in ("one", "two", "three")], api_key="one", **quotas
    ) as server:

        async def sent(key: str, size: int) -> str:
            answer = await server.http.post(
                "/v1/files",
                content=PURPOSE + part("file", b"x" * size, '; filename="a"') + END,
                headers=HEAD | {"authorization": f"Bearer {key}"},
            )
            return "ok" if answer.status_code == 200 else answer.json()["error"]["code"]

        assert [await sent("one", 40_000) for _ in range(3)] == ["ok", "ok", "file_quota_exceeded"]
        assert [await sent("two", 10) for _ in range(4)] == ["ok", "ok", "ok", "file_quota_exceeded"]
        assert await sent("three", 50_000) == "storage_full"
        first = (await server.sdk.with_options(api_key="one").files.list()).data[0]
        await server.sdk.with_options(api_key="one").files.delete(first.id)
        assert await sent("three", 50_000) == "ok"


async def test_active_batches_are_limited(tmp_path: Path) -> None:
    async with batched(tmp_path, batch_max_active=2) as server:
        file = await upload(server, line(1))
        body = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        server.client.status_value = type(server.client.status_value)("loading")  # no batch ends
        answers = [await server.http.post("/v1/batches", json=body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[-1].json()["error"]["code"] == "batch_quota_exceeded"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\\\a\\\\b.jsonl", "b.jsonl"),
        ("", "file"),
        ("a\\u202eb", "a\\u202eb"),
    ],
)
async def test_file_names_are_never_used_as_paths(tmp_path: Path, given: str, shown: str) -> None:
    async with batched(tmp_path) as server:
        body = PURPOSE + part("file", b"{}", f'; filename="{given}"') + END
        file = (await server.http.post("/v1/files", content=body, headers=HEAD)).json()
        assert file["filename"] == shown.rpartition("\\")[2]
        assert [path.name for path in (tmp_path / "store.sqlite3.files").iterdir()] == [file["id"]]


async def test_files_on_postgresql_need_batch_storage(database: str, tmp_path: Path) -> None:
    async with served(response_store=database) as server:
        for method, path in (("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/batches")):
            answer = await server.http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "files_disabled")
            assert "--batch-storage" in answer.json()["error"]["message"]
    async with served(response_store=database, batch_storage=str(tmp_path)) as server:
        batch = await ended(server, await created(server, line(1)))
        assert (batch.status, len(await records(server, batch.output_file_id))) == ("completed", 1)


async def test_a_disconnect_frees_the_quota_of_an_upload(tmp_path: Path) -> None:
    async with batched(tmp_path, batch_max_files=1) as server:

        async def body() -> Any:
            yield PURPOSE + part("file", b"x" * 1000, '; filename="a"')
            await asyncio.sleep(60)

        sending = asyncio.create_task(server.http.post("/v1/files", content=body(), headers=HEAD))
        await uploading(server, 1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await upload(server, line(1))
        assert len((await server.sdk.files.list()).data) == 1


async def test_slow_uploads_of_a_key_leave_slots_to_others(tmp_path: Path) -> None:
    async with batched(tmp_path, keys=[hash_key(key) for key in ("one", "two")], api_key="one") as server:

        async def body() -> Any:
            yield PURPOSE
            await asyncio.sleep(60)

        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        slow = [
            asyncio.create_task(server.http.post("/v1/files", content=body(), headers=HEAD | one))
            for _ in range(MAX_UPLOADS)
        ]
        await uploading(server, MAX_UPLOADS)
        whole = PURPOSE + FILE + END
        refused = await server.http.post("/v1/files", content=whole, headers=HEAD | one)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        for _ in range(3):
            assert (await server.http.post("/v1/files", content=whole, headers=HEAD | two)).status_code == 200
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
