"""A tool's name is always a declared one; no special token stands in names, arguments or content."""

from __future__ import annotations

import pytest

from chorale.harmony.vocab import load_vocabulary
from chorale.testing.scripted_client import Script, ScriptedClient
from tests.support.faces import WAYS, WEATHER, ask
from tests.support.scripted import ids
from tests.support.server import Server, with_server

SPELLED = [
    "get_weather<|channel|>commentary",
    "get_weather<|constrain|>json",
    "get_weathercommentary",
    "get_weatherjson",
    "get-weather",
    "Get_Weather",
    "weather.get_weather",
]


def spelling(name: str) -> ScriptedClient:
    """The name's markers are ordinary text, as models write them when they slip."""
    vocab = load_vocabulary()
    tokens = [*ids("<|channel|>"), *vocab.encode(f"commentary to=functions.{name}")]
    tokens += [*ids("<|message|>"), *vocab.encode('{"city":"<b>"}'), *ids("<|call|>")]
    return ScriptedClient(lambda request, index: Script(tokens))


@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_the_declared_name_is_meant(face: str, stream: bool, name: str) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        [(called, arguments)] = outcome.calls
        assert called == "get_weather"
        assert "<|" not in arguments + outcome.text + outcome.reasoning

    with_server(spelling(name), main)
