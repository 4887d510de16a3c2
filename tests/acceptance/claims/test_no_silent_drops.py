"""Content that the model cannot read gets a 400 that names its type and position, and is never dropped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.faces import send
from tests.support.scripted import FINAL, playing
from tests.support.server import served

URL = "data:image/png;base64,AAAA"
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"type": "image_url", "image_url": {"url": URL}}, "image_url"),
    ("chat", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
    ("chat", {"type": "file", "file": {"file_id": "f"}}, "file"),
    ("chat", {"type": "video_url", "video_url": {"url": "x"}}, "video_url"),
    ("responses", {"type": "input_image", "image_url": URL}, "input_image"),
    ("responses", {"type": "input_file", "file_id": "f"}, "input_file"),
    ("responses", {"type": "input_audio", "data": ""}, "input_audio"),
    ("messages", {"type": "image", "source": {"type": "url", "url": "x"}}, "image"),
    ("messages", {"type": "document", "source": {"type": "url", "url": "x"}}, "url"),
    ("messages", {"type": "container_upload", "file_id": "f"}, "container_upload"),
]


@pytest.mark.parametrize(("face", "part", "word"), CASES, ids=lambda value: str(value)[:24])
async def test_the_unsupported_part_is_named(face: str, part: dict[str, Any], word: str) -> None:
    text = {"type": "input_text" if face == "responses" else "text", "text": "look:"}
    said = [{"role": "user", "content": "hi"}, {"role": "user", "content": [text, part]}]

    async with served(playing(FINAL + "ok<|return|>")) as server:
        body: dict[str, Any] = {"model": "demo"}
        body |= {"input": said} if face == "responses" else {"messages": said}
        if face == "messages":
            body["max_tokens"] = 9
        response = await send(server, face, body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert f"{'input' if face == 'responses' else 'messages'}[1].content[1]" in message
        assert word in message
        assert server.client.requests == []
