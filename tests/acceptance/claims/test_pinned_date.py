"""With a pinned date the same request on two days makes the same prompt, to the token."""

from __future__ import annotations

import datetime

import pytest

import chorale.turns.prompt.encode as prompt_module
from tests.support.faces import FACES, ask
from tests.support.scripted import FINAL, playing
from tests.support.server import Server, with_server


def on_day(monkeypatch: pytest.MonkeyPatch, day: str, face: str, pin: str | None) -> list[int]:
    class Day(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date.fromisoformat(day)

    monkeypatch.setattr(prompt_module.datetime, "date", Day)

    async def main(server: Server) -> list[int]:
        await ask(server, face)
        return server.prompt_ids()

    ids: list[int] = with_server(playing(FINAL + "ok<|return|>"), main, system_start_date=pin)
    return ids


@pytest.mark.parametrize("face", FACES)
def test_two_days_one_prompt(monkeypatch: pytest.MonkeyPatch, face: str) -> None:
    days = ("2026-03-01", "2026-03-02")
    pinned = [on_day(monkeypatch, day, face, "2025-06-28") for day in days]
    assert pinned[0] == pinned[1]
    free = [on_day(monkeypatch, day, face, None) for day in days]
    assert free[0] != free[1]
