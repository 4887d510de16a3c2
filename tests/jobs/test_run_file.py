"""Files run by ``run-batch``: order, faulty lines, interruption and resumption, URLs."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from chorale.errors import ChoraleError, ConfigError
from chorale.jobs import files, run_file
from chorale.jobs.execute import LineRetries
from chorale.jobs.files import Destination, download
from chorale.jobs.line import Answer, Line
from chorale.jobs.run_file import FileWork, Journal, ServerGoneError
from chorale.requests.openai_client import NoAnswerError
from chorale.store.protocol import StoreError
from tests.support.tools.http_files import HttpFiles


def request(custom_id: str, **changes: Any) -> str:
    made = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id}}
    return json.dumps(made | changes)


class Echo:
    """Answers each line with its body, and counts requests."""

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.sent: Counter[str] = Counter()
        self.num_running = self.most_running = 0
        self._delay = delay

    async def __call__(self, line: Line) -> Answer:
        self.sent[line.custom_id] += 1
        self.num_running += 1
        self.most_running = max(self.num_running, self.most_running)
        try:
            await asyncio.sleep(self._delay())
        finally:
            self.num_running -= 1
        if line.custom_id == "faulty":
            raise ValueError("a fault of this line")
        return Answer(200, "req", line.body)


def opened(folder: Path, text: str | bytes | None = None, target: str = "m", **options: Any) -> Journal:
    path = folder / "in.jsonl"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Journal(folder / "out.jsonl.journal", path, target, **options)


def records(journal: Journal) -> list[dict[str, Any]]:
    file = io.BytesIO()
    journal.write_to(file)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def names(journal: Journal) -> list[str]:
    return [record["custom_id"] for record in records(journal)]


async def interrupted(work: FileWork, seconds: float, times: int = 1) -> None:
    task = asyncio.create_task(work.run())
    await asyncio.wait([task], timeout=seconds)
    for _ in range(times):
        work.interrupt()
    await task


def test_the_output_has_the_order_of_the_input(tmp_path: Path) -> None:
    wanted = [*(f"n{i}" for i in range(60)), "faulty"]
    journal = opened(tmp_path, "\n".join(map(request, wanted)))  # no final line end
    echo = Echo(lambda: random.random() / 100)
    asyncio.run(journal.work(echo, 8).run())
    assert echo.sent == dict.fromkeys(wanted, 1)
    assert echo.most_running == 8
    assert names(journal) == wanted
    assert journal.failures() == {"no_answer": 1}
    assert journal.now().num_done == journal.batch.num_lines == 61
    journal.close(remove=True)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_bad_line_does_not_stop_others(tmp_path: Path) -> None:
    lines = [
        request("first"), "", "nonsense", "  ", request("embedding", url="/v1/embeddings"), request("first"),
        request("x" * 3000), request("stream", body={"stream": True}), request("last"),
    ]  # fmt: skip
    text = b"\xef\xbb\xbf" + "\r\n".join(lines).encode()
    journal = opened(tmp_path, text, max_line_bytes=2000)
    echo = Echo()
    asyncio.run(journal.work(echo, 2).run())
    assert echo.sent == {"first": 1, "last": 1}
    found = [(r["custom_id"], (r["error"] or {}).get("code")) for r in records(journal)]
    assert found == [
        ("first", None), (None, "invalid_json_line"), ("embedding", "invalid_url"),
        ("first", "duplicate_custom_id"), (None, "line_too_large"), ("stream", "unsupported_value"),
        ("last", None),
    ]  # fmt: skip
    ended = journal.now()
    assert (ended.num_lines, ended.num_completed, ended.num_failed) == (7, 2, 5)
    assert journal.failures() == dict.fromkeys((code for _, code in found if code), 1)
    journal.close()


def test_interrupted_runs_send_no_recorded_line_again(tmp_path: Path) -> None:
    """Each run is interrupted at a random moment."""
    chance = random.Random(7)
    wanted = [f"n{i}" for i in range(120)]
    text = "\n".join(map(request, wanted)) + "\n"
    recorded: set[str] = set()
    for _ in range(200):
        journal = opened(tmp_path, text)
        assert journal.num_before == len(recorded)
        echo = Echo(lambda: chance.random() / 300)
        asyncio.run(interrupted(journal.work(echo, 4), chance.random() / 30, times=2))
        assert echo.num_running == 0  # all were aborted
        assert not recorded & echo.sent.keys()
        recorded = set(names(journal))
        if len(recorded) == len(wanted):
            break
        journal.close()
    assert names(journal) == wanted
    assert all(record["response"]["body"] == {"prompt": record["custom_id"]} for record in records(journal))
    journal.close()


def test_an_interruption_finishes_the_lines_in_flight(tmp_path: Path) -> None:
    journal = opened(tmp_path, "\n".join(request(f"n{i}") for i in range(50)))
    echo = Echo(lambda: 0.03)
    asyncio.run(interrupted(journal.work(echo, 5), 0.05))
    assert 0 < journal.now().num_done == len(echo.sent) < 50
    journal.close()


def test_a_journal_belongs_to_one_run(tmp_path: Path) -> None:
    text = "\n".join(request(f"n{i}") for i in range(5))
    journal = opened(tmp_path, text)
    with pytest.raises(ConfigError, match="another run-batch is writing"):
        opened(tmp_path)
    asyncio.run(journal.work(Echo(), 1).run())
    journal.close()
    for changed, what in (({"target": "other"}, "model or server"), ({"text": text + "\n"}, "another input")):
        with pytest.raises(ConfigError, match=what):
            opened(tmp_path, **changed)
    again = opened(tmp_path, restart=True)
    assert (again.num_before, again.now().num_done) == (0, 0)
    again.close(remove=True)
    (tmp_path / "out.jsonl.journal").write_text("some notes\n")
    with pytest.raises(ConfigError, match="not a journal"):
        opened(tmp_path)
    assert (tmp_path / "out.jsonl.journal").read_text() == "some notes\n"


def test_a_server_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    journal = opened(tmp_path, "\n".join(request(f"n{i}") for i in range(40)))
    answered = 0

    async def send(line: Line) -> Answer:
        nonlocal answered
        if answered == 3:
            raise NoAnswerError("no answer from nowhere")
        answered += 1
        return Answer(200, "req", b"{}")

    retries = LineRetries(patience=0.1, first_delay=0.01, longest_delay=0.02)
    with pytest.raises(ServerGoneError, match="nowhere"):
        asyncio.run(journal.work(send, 2, retries=retries).run())
    assert journal.now().num_done == 3  # the others are sent by the next run
    journal.close()


def test_an_input_that_fails_ends_the_run_after_the_lines_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path, "\n".join(request(f"n{i}") for i in range(20)))

    async def broken(path: Path) -> AsyncGenerator[bytes]:
        yield path.read_bytes()[:500]
        raise OSError("the disk")

    monkeypatch.setattr(run_file, "read_file", broken)
    echo = Echo(lambda: 0.01)
    with pytest.raises(OSError, match="the disk"):
        asyncio.run(journal.work(echo, 20).run())
    assert 0 < len(echo.sent) == journal.now().num_done < 20
    journal.close()


def test_a_full_disk_ends_the_run_and_the_next_one_continues(tmp_path: Path) -> None:
    """SQLite's ``max_page_count`` simulates the full disk."""
    wanted = [f"n{i}" for i in range(40)]
    journal = opened(tmp_path, "\n".join(map(request, wanted)))

    async def send(line: Line) -> Answer:
        return Answer(200, "req", json.dumps(random.Random(line.custom_id).randbytes(20_000).hex()).encode())

    def fill(db: Any) -> None:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count={pages + 80}")

    asyncio.run(journal._store._access.write(fill))
    with pytest.raises(StoreError):
        asyncio.run(journal.work(send, 2).run())
    num_done = journal.now().num_done
    assert 0 < num_done < 40
    journal.close()
    again = opened(tmp_path)
    assert again.num_before == num_done
    asyncio.run(again.work(send, 2).run())
    assert names(again) == wanted
    again.close()


# --------------------------------------------------------------------------- URLs


def test_input_is_downloaded_from_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_DELAY", 0.01)
    with HttpFiles() as server:
        server.files["/in?token=secret"] = b"content\n" * 1000
        server.failures["/in?token=secret"] = [503, 500]
        download(f"{server.url}/in?token=secret", tmp_path / "in")
        assert (tmp_path / "in").read_bytes() == b"content\n" * 1000
        with pytest.raises(ChoraleError, match="HTTP 404") as caught:
            download(f"{server.url}/absent?token=secret", tmp_path / "in")
        assert "secret" not in caught.value.message
        monkeypatch.setattr(files, "MAX_DOWNLOAD", 8 * 1000 - 1)
        with pytest.raises(ChoraleError, match="larger than 7999 bytes"):
            download(f"{server.url}/in?token=secret", tmp_path / "in")


def write(file: BinaryIO) -> None:
    file.write(b"{}\n")


def test_output_is_uploaded_to_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_DELAY", 0.01)
    with HttpFiles() as server:
        destination = Destination.of(f"{server.url}/out?sig=1", tmp_path)
        server.failures["/out?sig=1"] = [500]
        destination.deliver(write)
        assert server.files["/out?sig=1"] == b"{}\n"
        server.failures["/out?sig=1"] = [403] * 9
        with pytest.raises(ChoraleError, match="HTTP 403"):
            destination.deliver(write)
        assert len(server.failures["/out?sig=1"]) == 8  # refused: not retried
        # Another signature gives the same journal, so an interrupted run is continued.
        assert Destination.of(f"{server.url}/out?sig=2", tmp_path).journal == destination.journal
    assert list(tmp_path.iterdir()) == []


def test_output_is_written_to_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_bytes()))
    reader.start()
    Destination.of("pipe", None).deliver(write)
    reader.join()
    assert read == [b"{}\n"]
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize(("name", "what"), [("", "folder"), ("absent/out", "not a folder")])
def test_unwritable_destinations_are_refused(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Destination.of(str(tmp_path / name), None)
