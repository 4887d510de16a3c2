"""The grammars' tokenizer, whose making holds the interpreter lock, exists before the engine serves."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENGINE = """
from chorale.config.engine import EngineConfig
from chorale.serve.engine.build import build_engine

core, _ = build_engine(EngineConfig(model="demo", num_threads=1, max_model_len=512))
"""
HTTP = """
import asyncio
from chorale.api.state import ServerState
from chorale.config.engine import ServerConfig
from chorale.serve.bootstrap import ApiStart
from chorale.serve.http.app import make_client, opened_app

async def main():
    server = ServerConfig(response_store=":memory:")
    start = ApiStart(
        directory="/nonexistent", server=server, model="m", api_key_hashes=(), socket_fds=(), parent_pid=1
    )
    async with opened_app(make_client(start), start) as (app, services):
        print(app.state.vocab.__dict__.keys() >= {"_encoder"})

asyncio.run(main())
"""
BUILT = """
from chorale.grammar import matcher
print(matcher._tokenizer.cache_info().currsize)
"""


@pytest.mark.parametrize(
    ("program", "found"), [(ENGINE, ["1"]), (HTTP, ["True", "0"])], ids=["engine", "http"]
)
def test_only_the_engine_builds_the_tokenizer_and_before_it_serves(program: str, found: list[str]) -> None:
    command = [sys.executable, "-c", program + BUILT]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.split() == found
