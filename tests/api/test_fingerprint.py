"""``system_fingerprint``: of every answer and chunk of Chat Completions and Completions."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.client.base import EngineInfo
from chorale.config.options.settings import merge
from chorale.errors import ConfigError
from chorale.version import __version__
from tests.support.scripted import scripted
from tests.support.server import served
from tests.support.sse import frames

ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, f"chorale-{__version__}-tp4-dp2-1234abcd"),
        ({"fingerprint_mode": "hash"}, f"chorale-{__version__}-1234abcd"),
        ({"fingerprint_mode": "custom", "fingerprint_value": "blue"}, "blue"),
        ({"fingerprint_mode": "none"}, None),
    ],
)
@pytest.mark.parametrize("path", ASKS)
async def test_the_operator_chooses_the_fingerprint(
    path: str, options: dict[str, Any], expected: str | None
) -> None:
    client = scripted()
    client.info_value = EngineInfo(
        model="m", max_model_len=4096, max_num_seqs=4, tensor_parallel_size=4, fingerprint="1234abcd"
    )
    async with served(client, data_parallel_size=2, **options) as server:
        _, body = await server.post(path, **ASKS[path])
        chunks = frames(await server.http.post(path, json={**ASKS[path], "stream": True}))
    found = {each.get("system_fingerprint", "absent") for each in (body, *chunks)}
    assert found == {"absent" if expected is None else expected}


@pytest.mark.parametrize("given", [["--fingerprint-mode", "custom"], ["--fingerprint-value", "blue"]])
def test_a_custom_fingerprint_needs_mode_and_value(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="--fingerprint-value"):
        merge(given, {})
