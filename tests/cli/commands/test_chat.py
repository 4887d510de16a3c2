"""``chorale chat`` continues after errors; ``chat`` and ``complete`` refuse invalid URLs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from chorale.cli.commands.client import complete
from chorale.cli.commands.client.chat import chat_parser
from chorale.cli.commands.client.session import Session
from chorale.cli.main import main
from chorale.requests.openai_client import Client, Endpoint


class Stream(httpx2.SyncByteStream):
    """The body of an answer, which breaks off with an error unless ``whole`` is set."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole

    def __iter__(self) -> Iterator[bytes]:
        yield b'data: {"choices":[{"delta":{"content":"some"}}]}\n\n'
        if not self._whole:
            raise httpx2.RemoteProtocolError("cut")


def answer(request: httpx2.Request) -> httpx2.Response:
    text = json.loads(request.content)["messages"][-1]["content"]
    if text == "gone":
        raise httpx2.ConnectError("refused")
    if text == "echo":  # the answer is the request
        event = {"choices": [{"delta": {"content": request.content.decode()}}]}
        return httpx2.Response(200, text=f"data: {json.dumps(event)}\n\n")
    return httpx2.Response(200, stream=Stream(text == "whole"))


@pytest.fixture
def session() -> Session:
    client = Client(Endpoint("http://test/v1"), transport=httpx2.MockTransport(answer))
    return Session(client, "m", chat_parser().parse_args([]))


@pytest.mark.parametrize(
    ("text", "words"), [("gone", "ConnectError: refused"), ("broken off", "RemoteProtocolError: cut")]
)
def test_a_lost_connection_fails_only_that_message(
    session: Session, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert session.ask(text) == 1
    assert f"error: no answer from http://test/v1 ({words})" in capsys.readouterr().err
    assert session.ask("whole") == 0
    assert [message["content"] for message in session.messages] == ["whole", "some"]


Type = Callable[..., tuple[str, str]]  # lines -> what is shown: standard output and error


@pytest.fixture
def typed(session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    def enter(*lines: str) -> tuple[str, str]:
        given = iter([*lines, "/quit"])
        monkeypatch.setattr("builtins.input", lambda _: next(given))
        assert session.loop() == 0
        return capsys.readouterr()

    return enter


def test_a_file_that_cannot_be_written_does_not_end_the_conversation(typed: Type, tmp_path: Path) -> None:
    _, error = typed("whole", f"/save {tmp_path}", f"/save {tmp_path}/all.json")
    assert "cannot write" in error
    assert len(json.loads((tmp_path / "all.json").read_text())) == 2


@pytest.mark.parametrize(
    ("line", "named"),
    [("/sistem x", "/system"), ("/effort hihg", "high"), ("/save", "/save"), ("/retry", "question")],
)
def test_a_bad_command_says_what_was_wrong(session: Session, typed: Type, line: str, named: str) -> None:
    _, error = typed(line)
    assert named in error
    assert len(error.splitlines()) == 1
    assert session.messages == []


def test_settings_are_confirmed_and_sent(session: Session, typed: Type) -> None:
    shown, _ = typed("/system Be brief.", "/effort high", "echo")
    assert "Reasoning effort set to high." in shown
    sent = json.loads(session.messages[-1]["content"])
    assert sent["reasoning_effort"] == "high"
    assert [each["content"] for each in sent["messages"]] == ["Be brief.", "echo"]


def test_retry_replaces_the_last_answer(session: Session, typed: Type) -> None:
    typed("whole", "whole", "/retry")
    assert [each["role"] for each in session.messages] == ["user", "assistant"] * 2


def test_retry_repeats_a_question_that_failed(session: Session, typed: Type) -> None:
    _, error = typed("whole", "gone", "/retry")
    assert error.count("ConnectError") == 2
    assert [each["content"] for each in session.messages] == ["whole", "some"]


def test_a_saved_conversation_is_loaded_with_its_system_prompt(
    session: Session, typed: Type, tmp_path: Path
) -> None:
    file = tmp_path / "chat.json"
    typed("/system Be brief.", "whole", f"/save {file}", "/clear", "/system Be rude.")
    assert session.messages == []
    typed(f"/load {file}", "echo")
    sent = json.loads(session.messages[-1]["content"])["messages"]
    assert [each["content"] for each in sent] == ["Be brief.", "whole", "some", "echo"]


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"role": "user"}]', "no"])
def test_a_file_without_a_conversation_changes_nothing(
    session: Session, typed: Type, content: str, tmp_path: Path
) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)
    _, error = typed("whole", f"/load {file}")
    assert str(file) in error
    assert len(session.messages) == 2


@pytest.mark.parametrize("model", [[], ["--model-name", "m"]])
@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize("url", ["foo", "ftp://x/v1", "http:///v1", "http://localhost:abc/v1"])
def test_an_invalid_url_is_refused(
    command: str, url: str, model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--url", url, *model, "-q", "x"]) == 2
    shown = capsys.readouterr().err
    words = "Invalid port" if "abc" in url else "not an http:// or https:// URL; give one such as http"
    assert shown.startswith(f"chorale: error: --url {url}: {words}")
    assert len(shown.splitlines()) == 1


def test_complete_prints_its_speed_with_stats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        assert json.loads(request.content)["stream_options"] == {"include_usage": True}
        events = [{"choices": [{"text": "two"}]}, {"choices": [], "usage": {"completion_tokens": 7}}]
        return httpx2.Response(200, text="".join(f"data: {json.dumps(event)}\n\n" for event in events))

    @contextlib.contextmanager
    def connected(*_: object) -> Iterator[tuple[Client, str]]:
        yield Client(Endpoint("http://test/v1"), transport=httpx2.MockTransport(answer)), "m"

    monkeypatch.setattr(complete, "connected", connected)
    assert main(["complete", "-q", "one"]) == 0
    assert capsys.readouterr() == ("two\n", "")
    assert main(["complete", "-q", "one", "--stats"]) == 0
    assert "(7 tokens, " in capsys.readouterr().err
