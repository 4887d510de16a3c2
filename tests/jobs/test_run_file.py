"""A batch from a file to a file: order, faulty lines, interruption and resumption, input and output URLs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chorale.errors import ChoraleError, ConfigError
from chorale.jobs import files
from chorale.jobs.files import Destination, download, examine, lines_of
from chorale.jobs.journal import Header, Journal
from chorale.jobs.line import Answer, Line
from chorale.jobs.run_file import FileRun, ServerGoneError
from chorale.requests.openai_client import NoAnswerError, Retries
from tests.support.tools.http_files import http_files


def request(custom_id: str, **changes: Any) -> str:
    made = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id}}
    return json.dumps(made | changes)


class Echo:
    """Answers each line by its body, and counts."""

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.sent: Counter[str] = Counter()
        self._delay = delay

    async def __call__(self, line: Line) -> Answer:
        self.sent[line.custom_id] += 1
        await asyncio.sleep(self._delay())
        return Answer(200, "req", line.body)


class Opened:
    """The files of a run in a folder."""

    def __init__(self, folder: Path, text: str | bytes | None = None, **options: Any) -> None:
        path = folder / "in.jsonl"
        if text is not None:
            path.write_bytes(text.encode() if isinstance(text, str) else text)
        self.source = examine(path)
        self.destination = Destination.of(str(folder / "out.jsonl"), None)
        header = Header(
            input_sha256=self.source.sha256,
            num_lines=self.source.num_lines,
            target=options.pop("target", "m"),
        )
        self.journal = Journal(self.destination.journal, header, restart=options.pop("restart", False))
        self.run = FileRun(self.source, self.journal, **options)

    def deliver(self) -> list[dict[str, Any]]:
        assert self.run.complete
        self.destination.deliver(self.journal)
        self.journal.close(remove=True)
        return [json.loads(line) for line in Path(self.destination.name).read_bytes().splitlines()]


def test_the_output_has_the_order_of_the_input(tmp_path: Path) -> None:
    names = [f"n{i}" for i in range(60)]
    opened = Opened(tmp_path, "\n".join(map(request, names)))  # no line end at the end
    asyncio.run(opened.run.run(Echo(lambda: random.random() / 100), 8))
    assert [record["custom_id"] for record in opened.deliver()] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_one_bad_line_stops_no_other(tmp_path: Path) -> None:
    lines = [
        request("first"), "", "nonsense", "  ", request("embedding", url="/v1/embeddings"), request("first"),
        request("x" * 3000), request("stream", body={"stream": True}), request("last"),
    ]  # fmt: skip
    opened = Opened(tmp_path, b"\xef\xbb\xbf" + "\r\n".join(lines).encode(), max_bytes=2000)
    echo = Echo()
    asyncio.run(opened.run.run(echo, 2))
    assert echo.sent == {"first": 1, "last": 1}
    found = [(r["custom_id"], (r["error"] or {}).get("code")) for r in opened.deliver()]
    assert found == [
        ("first", None), (None, "invalid_json_line"), ("embedding", "invalid_url"),
        ("first", "duplicate_custom_id"), (None, "line_too_large"), ("stream", "unsupported_value"),
        ("last", None),
    ]  # fmt: skip
    assert (opened.source.num_lines, opened.source.num_requests) == (9, 7)
    assert (opened.run.now.num_ok, opened.run.now.num_failed) == (2, 5)


def test_no_line_is_done_twice_over_many_interruptions(tmp_path: Path) -> None:
    """Each run is cut off at a random moment, its last record torn like that of a killed process."""
    chance = random.Random(7)
    names = [f"n{i}" for i in range(120)]
    text = "\n".join(map(request, names)) + "\n"
    recorded: set[str] = set()
    for _ in range(200):
        opened = Opened(tmp_path, text)
        assert opened.run.before.num_lines == len(recorded)
        echo = Echo(lambda: chance.random() / 300)

        async def cut(opened: Opened = opened, echo: Echo = echo) -> None:
            task = asyncio.create_task(opened.run.run(echo, 4))
            await asyncio.wait([task], timeout=chance.random() / 60)
            opened.run.stop()
            opened.run.stop()
            await task

        asyncio.run(cut())
        assert not recorded & echo.sent.keys()
        if opened.run.complete:
            break
        recorded = {json.loads(record)["custom_id"] for record in opened.journal.records()}
        opened.journal.close()
        with opened.destination.journal.open("ab") as file:
            file.write(
                [b"", b"7", b'7 {"id": "tor', b"7 {}x\n", b"\x00\x00\n", b"999 {}\n"][chance.randrange(6)]
            )
    records = opened.deliver()
    assert [record["custom_id"] for record in records] == names
    assert all(record["response"]["body"] == {"prompt": record["custom_id"]} for record in records)


def test_stopping_finishes_the_lines_in_flight(tmp_path: Path) -> None:
    opened = Opened(tmp_path, "\n".join(request(f"n{i}") for i in range(50)))
    echo = Echo(lambda: 0.03)

    async def main() -> None:
        task = asyncio.create_task(opened.run.run(echo, 5))
        await asyncio.sleep(0.01)
        opened.run.stop()
        await task

    asyncio.run(main())
    assert not opened.run.complete
    assert 0 < opened.journal.num_done == len(echo.sent) < 50
    opened.journal.close()


def test_a_journal_belongs_to_one_run(tmp_path: Path) -> None:
    text = "\n".join(request(f"n{i}") for i in range(5))
    opened = Opened(tmp_path, text)
    with pytest.raises(ConfigError, match="another run-batch is writing"):
        Opened(tmp_path)
    opened.journal.add(1, b"{}")
    opened.journal.close()
    for changed, what in (({"target": "other"}, "model or server"), ({"text": text + "\n"}, "another input")):
        with pytest.raises(ConfigError, match=what):
            Opened(tmp_path, **changed)
    again = Opened(tmp_path, restart=True)
    assert again.journal.num_done == 0
    again.journal.close()
    again.destination.journal.write_text("some notes\n")
    with pytest.raises(ConfigError, match="not a journal"):
        Opened(tmp_path)


def test_a_server_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    opened = Opened(
        tmp_path,
        "\n".join(request(f"n{i}") for i in range(40)),
        retries=Retries(patience=0.1, first_delay=0.01, longest_delay=0.02),
    )
    answered = 0

    async def send(line: Line) -> Answer:
        nonlocal answered
        if answered == 3:
            raise NoAnswerError("no answer from nowhere")
        answered += 1
        return Answer(200, "req", b"{}")

    with pytest.raises(ServerGoneError, match="nowhere"):
        asyncio.run(opened.run.run(send, 2))
    assert opened.journal.num_done == 3  # the others are sent by the next run
    opened.journal.close()


def test_lines_are_bounded_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a" * 5_000_000 + b"\nb\n" + b"c" * 10)
    assert [(number, len(raw)) for number, raw in lines_of(path, 100)] == [(1, 102), (2, 1), (3, 10)]
    assert examine(path).num_lines == 3


# --------------------------------------------------------------------------- URLs


def test_input_from_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_DELAY", 0.01)
    with http_files() as server:
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


def test_output_to_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_DELAY", 0.01)
    journal = Journal(tmp_path / "x.journal", Header(input_sha256="", num_lines=2, target=""))
    journal.add(2, b'{"b": 2}')
    journal.add(1, b'{"a": 1}')
    with http_files() as server:
        destination = Destination.of(f"{server.url}/out?sig=1", tmp_path)
        server.failures["/out?sig=1"] = [500]
        destination.deliver(journal)
        assert server.files["/out?sig=1"] == b'{"a": 1}\n{"b": 2}\n'
        server.failures["/out?sig=1"] = [403] * 9
        with pytest.raises(ChoraleError, match="HTTP 403"):
            destination.deliver(journal)
        assert len(server.failures["/out?sig=1"]) == 8  # refused: not tried again
        # A new signature is the same output, so an interrupted run is found again.
        assert Destination.of(f"{server.url}/out?sig=2", tmp_path).journal == destination.journal
    journal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["x.journal"]


def test_output_to_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_bytes()))
    reader.start()
    destination = Destination.of("pipe", None)
    journal = Journal(destination.journal, Header(input_sha256="", num_lines=1, target=""))
    journal.add(1, b"{}")
    destination.deliver(journal)
    reader.join()
    journal.close(remove=True)
    assert read == [b"{}\n"]
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize(("name", "what"), [("", "folder"), ("absent/out", "not a folder")])
def test_places_that_cannot_be_written(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Destination.of(str(tmp_path / name), None)
