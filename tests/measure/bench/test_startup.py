"""``chorale bench startup``: which starts are counted, and that a server with a key can be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chorale.cli.main import main
from chorale.measure.bench import startup
from tests.support.grammar.structured import write_checkpoint


@pytest.mark.parametrize("cold", [0, 1])
def test_warm_starts_have_filled_caches(cold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object, cache: str, *__: object) -> tuple[float, float]:
        seconds = 1.0 if Path(cache, "filled").exists() else 9.0
        Path(cache, "filled").touch()
        return seconds, seconds

    monkeypatch.setattr(startup, "_start", start)
    found = startup.startup(
        ["--api-key", "sk-canary"], cold=cold, warm=1, timeout=1.0, api_keys=["sk-canary"]
    )
    assert found["warm_healthy_seconds"] == 1.0
    assert found.get("cold_healthy_seconds", 9.0) == 9.0
    assert "sk-canary" not in json.dumps(found)


def test_a_server_with_a_key_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORALE_API_KEY", "sk-canary")
    model = write_checkpoint(tmp_path / "model")
    out = tmp_path / "startup.json"
    line = ["bench", "startup", str(model), "--num-iters-warm", "0", "--output-json", str(out)]
    assert main(line) == 0
    assert json.loads(out.read_text())["cold_first_token_seconds"] > 0


def test_the_reason_of_a_failed_start_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", str(tmp_path / "none"), "--num-iters-warm", "0"]) == 2
    assert "no such folder" in capsys.readouterr().err
