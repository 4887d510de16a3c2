"""``include_record`` and ``chorale verify``: a record repeats its answer, and shows what has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from chorale.api.record import template_hash
from chorale.cli.commands.measure.verify import RecordedRound, first_difference
from chorale.cli.main import main
from chorale.model.safetensors_file import SafetensorsFile
from tests.support.grammar.structured import make_client, write_checkpoint
from tests.support.server import in_thread

USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "One two", "max_tokens": 12},
    "chat/completions": {"messages": USER, "max_tokens": 12, "n": 2, "presence_penalty": 0.5},
    "responses": {"input": "Hi", "max_output_tokens": 12, "top_p": 0.9, "store": False},
    "messages": {"messages": USER, "max_tokens": 12},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("m") / "m")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with in_thread(make_client(folder, batch_invariant=True, max_model_len=512)) as server:
        yield server.url


def answer(url: str, path: str, **fields: Any) -> dict[str, Any]:
    """The body, or the last event of a stream that has a record."""
    asked = {**BODIES[path], "include_record": True, **fields}
    found = httpx2.post(f"{url}/{path}", json=asked, timeout=120)
    assert found.status_code == 200, found.text
    if not fields.get("stream"):
        body: dict[str, Any] = found.json()
        return body
    events = [line[5:] for line in found.text.splitlines() if line.startswith("data:")]
    last: dict[str, Any] = json.loads(events[-1] if "[DONE]" not in events[-1] else events[-2])
    return last.get("response", last)


def verify(record: dict[str, Any], tmp_path: Path, *arguments: str) -> int:
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record))
    return main(["verify", str(file), *arguments])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_gives_a_record_that_repeats(
    path: str, stream: bool, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(url, path, stream=stream)
    record = found["record"]
    assert record["kernels"]["batch_invariant"] is True
    assert record["template_hash"] == template_hash()
    assert len(record["model"]["hash"]) == 64
    assert {each["choice"] for each in record["rounds"]} == set(range(BODIES[path].get("n", 1)))
    for each in record["rounds"]:
        assert len(each["logprobs"]) == len(each["output_token_ids"]) > 0
        assert all(score <= 0 for score in each["logprobs"])
    assert verify(found, tmp_path, "--server", url) == 0
    assert capsys.readouterr().out == "equal\n"


def test_the_server_chooses_a_seed(url: str) -> None:
    one, other, given = (answer(url, "completions", **more)["record"] for more in ({}, {}, {"seed": 7}))
    assert one["seed"] != other["seed"]
    assert given["seed"] == given["rounds"][0]["sampling"]["seed"] == 7


def test_answers_without_the_field_have_no_record(url: str) -> None:
    assert "record" not in answer(url, "completions", include_record=False)


def test_several_prompts_have_rounds_of_all_choices(url: str, tmp_path: Path) -> None:
    found = answer(url, "completions", prompt=[[1, 2], [3, 4]], n=2)
    assert sorted(each["choice"] for each in found["record"]["rounds"]) == [0, 1, 2, 3]
    assert verify(found, tmp_path, "--server", url) == 0


def test_several_chats_have_one_record(url: str, tmp_path: Path) -> None:
    asked = {"messages": [USER, USER], "max_tokens": 6, "include_record": True}
    found = httpx2.post(f"{url}/chat/completions/batch", json=asked, timeout=120).json()
    assert {each["choice"] for each in found["record"]["rounds"]} == {0, 1}
    assert verify(found, tmp_path, "--server", url) == 0


def test_another_seed_is_found(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = answer(url, "completions", seed=5)["record"]
    record["rounds"][0]["sampling"]["seed"] = 6
    assert verify(record, tmp_path, "--server", url) == 1
    assert capsys.readouterr().out.startswith("different: round 0 (choice 0), position 0: token ")


def test_a_model_here_repeats_what_a_server_wrote(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(url, "chat/completions")
    assert verify(found, tmp_path) == 0  # the record names the folder
    assert capsys.readouterr().out == "equal\n"


@pytest.mark.parametrize(("sampled", "code"), [(True, 2), (False, 1)])
def test_changed_weights_are_found(
    sampled: bool, code: int, url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the hash, if one is in the middle of a tensor, which the hash covers; by the answer in any case."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for file in copy.glob("*.safetensors"):
        data, read = bytearray(file.read_bytes()), SafetensorsFile(file)
        if "lm_head.weight" in read.entries:
            begin, end = read.span("lm_head.weight")
            for place in [(begin + end) // 2] if sampled else range(begin, (begin + end) // 2 - 1024, 64):
                data[place] ^= 4
        file.write_bytes(data)
    assert verify(answer(url, "completions"), tmp_path, str(copy)) == code
    said = capsys.readouterr().out
    assert said.startswith("cannot be compared: the model has hash" if code == 2 else "different: round 0")


def test_one_bit_of_a_log_probability_is_a_difference() -> None:
    recorded = RecordedRound([1], {}, [5, 6], [-1.0, -2.0])
    assert first_difference(recorded, ([5, 6], [-1.0, -2.0])) == ""
    assert first_difference(recorded, ([5, 6], [-1.0, -2.0000000000000004])).startswith("position 1: token 6")
    assert first_difference(recorded, ([5], [-1.0])) == "2 tokens became 1"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 1}', "[" * 100_000])
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(text)
    assert main(["verify", str(file)]) == 2


def test_constrained_answers_are_not_compared(url: str, tmp_path: Path) -> None:
    found = answer(url, "completions", structured_outputs={"choice": ["red", "blue"]})
    assert verify(found, tmp_path, "--server", url) == 2


def test_background_responses_have_no_record(url: str) -> None:
    asked = {"input": "Hi", "background": True, "include_record": True}
    refused = httpx2.post(f"{url}/responses", json=asked, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "include_record")
