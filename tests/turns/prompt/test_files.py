"""Files within a request: text is read, everything else is refused by place."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from chorale.api.responses.items.input import parse_items
from chorale.api.responses.items.to_harmony import item_text
from chorale.errors import RequestError
from chorale.requests.files import inline_file
from chorale.requests.messages import to_harmony

TEXT = base64.b64encode("Grüße, 漢字".encode()).decode()


@pytest.mark.parametrize(
    "data", [TEXT, f"data:text/plain;base64,{TEXT}", f"data:text/x-python;charset=utf-8;base64,{TEXT}"]
)
def test_a_text_file_is_read_with_its_name(data: str) -> None:
    assert inline_file({"file_data": data, "filename": "a.txt"}, "p", "file") == "a.txt\n\nGrüße, 漢字"
    assert inline_file({"file_data": data}, "p", "file") == "Grüße, 漢字"


@pytest.mark.parametrize(
    "file",
    [
        {},
        {"file_id": "f"},
        {"file_url": "http://x"},
        {"file_data": 5},
        {"file_data": base64.b64encode(b"%PDF-1.4\n\xff\xfe").decode()},
        {"file_data": base64.b64encode(b"a\x00b").decode()},
    ],
)
def test_other_files_are_refused(file: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        inline_file(file, "input[0].content[1]", "input_file")
    assert caught.value.param == "input[0].content[1].type"
    assert caught.value.code == "unsupported_content_type"


@pytest.mark.parametrize("data", ["no base64!", "YWJj=YWJj", "data:text/plain;base64,a"])
def test_a_file_that_is_not_base64_is_refused_as_such(data: str) -> None:
    with pytest.raises(RequestError) as caught:
        inline_file({"file_data": data}, "input[0].content[1]", "input_file")
    assert (caught.value.param, caught.value.code) == ("input[0].content[1].file_data", "invalid_value")


def test_files_are_read_in_chat_and_responses() -> None:
    file = {"file_data": TEXT, "filename": "a.txt"}
    [message] = to_harmony([{"role": "user", "content": [{"type": "file", "file": file}]}])
    assert message.content == "a.txt\n\nGrüße, 漢字"
    [item] = parse_items([{"role": "user", "content": [{"type": "input_file", **file}]}])
    assert item_text(item) == "a.txt\n\nGrüße, 漢字"
