"""``chorale pull`` and ``chorale list`` against a hub on 127.0.0.1; names and families of models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chorale.cli.main import main
from chorale.config.model_names import full_name
from chorale.errors import ConfigError
from chorale.model.cache import cached_models
from chorale.model.hub import check_family, find_folder, resolve_model
from tests.model.fake_hub import COMMIT, FakeHub, hub_environment

REPOSITORY = "someone/llama-killer"  # its config.json counts, not its name
WEIGHTS = bytes(range(256)) * 40_000  # 10 MB
INDEX = {
    "metadata": {"total_size": 2 * len(WEIGHTS)},
    "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"},
}
FILES = {
    "config.json": b'{"model_type": "gpt_oss"}',
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-1.safetensors": WEIGHTS,
    "model-2.safetensors": WEIGHTS[::-1],  # of its own: equal files share a blob
    "tokenizer.json": b"not needed",
}


def chorale(home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chorale", *arguments],
        env=hub_environment(home, **env),
        capture_output=True,
        text=True,
        timeout=120,
    )


def is_complete(home: Path) -> list[bool]:
    return [each.complete for each in cached_models(home / "hub")]


def test_pull_downloads_once_resumes_and_list_shows_it(tmp_path: Path) -> None:
    with FakeHub(REPOSITORY, FILES) as hub:
        first = chorale(tmp_path, "pull", REPOSITORY, HF_ENDPOINT=hub.url)
        again = chorale(tmp_path, "pull", REPOSITORY, HF_ENDPOINT=hub.url)
    assert first.returncode == 0, first.stderr
    assert "20.5 MB, of which 0.0 MB are in" in first.stdout
    assert "100%" in first.stdout
    assert f"serve it: chorale serve {REPOSITORY}" in first.stdout
    assert "20.5 MB, of which 20.5 MB are in" in again.stdout
    assert hub.sent["model-1.safetensors"] == len(WEIGHTS)
    assert hub.sent["tokenizer.json"] == 0
    (entry,) = json.loads(chorale(tmp_path, "list", "--json").stdout)
    assert (entry["name"], entry["revision"], entry["complete"]) == (REPOSITORY, COMMIT, True)
    assert entry["bytes"] == sum(len(data) for name, data in FILES.items() if name != "tokenizer.json")
    assert entry["weight_bytes"] == 2 * len(WEIGHTS)

    (folder,) = (tmp_path / "hub").glob("models--*/snapshots/*")
    (folder / "model-2.safetensors").resolve().unlink()
    (folder / "model-2.safetensors").unlink()
    assert is_complete(tmp_path) == [False]
    shown = chorale(tmp_path, "list").stdout
    assert COMMIT[:12] in shown
    assert "chorale pull resumes it" in shown
    assert "inside the package" in shown
    offline = chorale(tmp_path, "pull", REPOSITORY, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stderr.count("\n")) == (1, 1)
    with FakeHub(REPOSITORY, FILES) as hub:
        assert chorale(tmp_path, "pull", REPOSITORY, HF_ENDPOINT=hub.url).returncode == 0
        assert hub.sent["model-1.safetensors"] == 0
    assert is_complete(tmp_path) == [True]


def test_other_families_are_refused_before_their_weights(tmp_path: Path) -> None:
    files = {**FILES, "config.json": b'{"model_type": "llama"}'}
    with FakeHub(REPOSITORY, files) as hub:
        for command in ("pull", "serve"):
            done = chorale(tmp_path, command, REPOSITORY, HF_ENDPOINT=hub.url)
            assert done.returncode == 2
            assert done.stderr.count("\n") == 1
            assert "is of type 'llama': only gpt-oss is served: openai/gpt-oss-20b" in done.stderr
            assert "listening" not in done.stdout
    assert hub.sent["model-1.safetensors"] == 0
    assert is_complete(tmp_path) == []  # only its config.json is there, and it is no gpt-oss


def test_complete_models_are_not_downloaded_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for line in (["demo"], [str(tmp_path)], ["demo", "--revision", "main"]):
        code, found = main(["pull", *line]), capsys.readouterr()
        shown.append((code, found.out + found.err))
    assert [code for code, _ in shown] == [0, 0, 2]
    assert "ships inside the package: nothing to download" in shown[0][1]
    assert "is the folder" in shown[1][1]
    assert "has no revisions" in shown[2][1]


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("gpt-oss-20b", "20b"),
        ("120b", "120b"),
        ("gpt-oss:20b", "20b"),
        ("GPT-OSS-120B", "120b"),
        ("gpt-oss", "20b"),
        ("gpt-oss:latest", "20b"),
        ("gptoss-120b", "120b"),
        ("gpt-oss-safeguard", "safeguard-20b"),
        ("gpt-oss-safeguard:120b", "safeguard-120b"),
    ],
)
def test_short_names(short: str, full: str) -> None:
    assert full_name(short) == f"openai/gpt-oss-{full}"
    check_family(full_name(short))  # asks nobody


def test_a_folder_takes_precedence_over_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_folder("gpt-oss-20b") is None
    (tmp_path / "gpt-oss-20b").mkdir()
    assert resolve_model("gpt-oss-20b") == tmp_path / "gpt-oss-20b"
    with pytest.raises(ConfigError, match=r"--revision main: .* is a folder, which has no revisions"):
        resolve_model("gpt-oss-20b", revision="main")


def test_a_short_name_is_served_under_both() -> None:
    from chorale.config.options.settings import merge

    assert merge(["gpt-oss-20b"], {}).server.served_model_names == ("gpt-oss-20b", "openai/gpt-oss-20b")
    assert merge(["gpt-oss-20b", "--served-model-name", "x"], {}).server.served_model_names == ("x",)
    assert merge(["openai/gpt-oss-20b"], {}).server.served_model_names == ()
