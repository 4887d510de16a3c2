"""The effort of a turn: a field of the request, else a line of the instructions, else the default."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.config.options.settings import merge
from chorale.errors import ConfigError
from tests.support.faces import FACES, ask
from tests.support.scripted import FINAL, playing
from tests.support.server import Server, served

FIELDS: list[tuple[str, dict[str, Any], str]] = [
    *[("chat", {"reasoning_effort": name}, "low") for name in ("none", "minimal", "low")],
    *[("chat", {"reasoning_effort": name}, "high") for name in ("high", "xhigh")],
    ("chat", {"reasoning": {"effort": "low"}}, "low"),
    ("chat", {"chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
    *[("responses", {"reasoning": {"effort": name}}, "low") for name in ("none", "minimal", "low")],
    *[("responses", {"reasoning": {"effort": name}}, "high") for name in ("high", "max")],
    ("responses", {"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
    ("messages", {"thinking": {"type": "disabled"}}, "low"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 31999}}, "high"),
    ("messages", {"output_config": {"effort": "max"}}, "high"),
    (
        "messages",
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "high"}},
        "high",
    ),
]


async def shown(server: Server, face: str, instructions: str | None = None, **fields: Any) -> str:
    """Returns the effort in the prompt; asserts that its line is removed from the instructions."""
    await ask(server, face, instructions=instructions, **fields)
    prompt = server.prompt()
    assert ("# Instructions\n\nGo.<|end|>" in prompt) == (instructions is not None)
    return prompt.partition("Reasoning: ")[2].partition("\n\n# Valid channels")[0]


@pytest.mark.parametrize(("face", "fields", "effort"), FIELDS, ids=str)
async def test_a_field_overrides_the_instructions(face: str, fields: dict[str, Any], effort: str) -> None:
    line = f"Reasoning: {'low' if effort == 'high' else 'high'}\nGo."
    async with served(playing(FINAL + "ok<|return|>")) as server:
        assert await shown(server, face, **fields) == effort
        assert await shown(server, face, line, **fields) == effort


@pytest.mark.parametrize("face", FACES)
async def test_a_line_of_the_instructions_overrides_the_default(face: str) -> None:
    async with served(playing(FINAL + "ok<|return|>"), default_reasoning_effort="high") as server:
        assert await shown(server, face) == "high"
        assert await shown(server, face, "Reasoning: low\nGo.") == "low"
        assert await shown(server, face, history=("Reasoning: low",)) == "high"  # no instructions


@pytest.mark.parametrize(
    ("face", "fields"),
    [
        ("chat", {"reasoning_effort": "high"}),
        ("responses", {"reasoning": {"effort": "high"}}),
        ("messages", {"output_config": {"effort": "high"}}),
    ],
)
async def test_the_operator_s_map_applies_to_requested_efforts_only(
    face: str, fields: dict[str, Any]
) -> None:
    mapped = {"high": "none", "low": "max"}
    async with served(playing(FINAL + "ok<|return|>"), reasoning_effort_map=mapped) as server:
        assert await shown(server, face, **fields) == "low"
        assert await shown(server, face) == "medium"
        assert await shown(server, face, "Reasoning: high\nGo.") == "high"


@pytest.mark.parametrize(("given", "effort"), [("auto", "low"), ("none", "low"), ("medium", "medium")])
async def test_the_operator_sets_the_effort_of_messages_without_thinking(given: str, effort: str) -> None:
    disabled = {"thinking": {"type": "disabled"}}
    async with served(playing(FINAL + "ok<|return|>"), disabled_thinking_effort=given) as server:
        assert await shown(server, "messages", **disabled) == effort
        assert await shown(server, "messages", output_config={"effort": "high"}, **disabled) == "high"


@pytest.mark.parametrize("given", ['{"high": "huge"}', '{"huge": "high"}', '{"high": 1}', '["high"]'])
def test_a_map_of_unknown_efforts_stops_the_start(given: str) -> None:
    with pytest.raises(ConfigError, match="--reasoning-effort-map"):
        merge(["--reasoning-effort-map", given], {})
