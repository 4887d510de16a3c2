"""resolve_model: folders, the demo, and a hub: a fake one on 127.0.0.1, in a process of its own settings.

huggingface_hub reads its environment when it is imported, so each hub case runs in a fresh interpreter: what
is tested is what a user's ``HF_*`` variables do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chorale.errors import ConfigError
from chorale.model.hub import resolve_head, resolve_model
from tests.model.fake_hub import COMMIT, FakeHub, hub_environment

REPOSITORY = "someone/small-gpt-oss"
WEIGHTS = bytes(range(256)) * 4096  # 1 MB
PUBLISHED = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "README.md": b"not needed",
    "chat_template.jinja": b"not needed",
    "tokenizer.json": b"not needed",
    "model.safetensors.index.json": b"{}",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[:1000],
    "original/config.json": b"{}",
    "original/model.safetensors": b"not needed",
    "metal/model.bin": b"not needed",
}

CHILD = """
import json, sys
from chorale.errors import ConfigError
from chorale.model.hub import resolve_model
for asked in json.loads(sys.argv[1]):
    seen = []
    try:
        folder = resolve_model(asked.pop("model"), **asked, progress=lambda *report: seen.append(report))
        print(json.dumps({"folder": str(folder), "progress": seen, "torch": "torch" in sys.modules}))
    except ConfigError as error:
        print(json.dumps({"error": error.message}))
"""


def resolve(home: Path, *asked: dict[str, str], code: str = CHILD, **env: str) -> list[dict[str, Any]]:
    """What a process with these variables finds, one model after the other."""
    given = [{"model": REPOSITORY, **each} for each in asked]
    child = subprocess.run(
        [sys.executable, "-c", code, json.dumps(given)],
        env=hub_environment(home, **env),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]


def names(folder: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def test_only_the_needed_files_with_bytes_per_second(tmp_path: Path) -> None:
    with FakeHub(REPOSITORY, PUBLISHED) as hub:
        result, again = resolve(tmp_path, {}, {}, HF_ENDPOINT=hub.url)
    assert "error" not in result, result
    wanted = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    wanted |= {name for name in PUBLISHED if name.startswith("model-")}
    assert names(result["folder"]) == wanted
    assert result["folder"].startswith(str(tmp_path))
    assert not result["torch"]
    phases = {phase for phase, _, _ in result["progress"]}
    fractions = [fraction for _, fraction, _ in result["progress"]]
    assert phases == {"download"}
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert "MB/s" in result["progress"][-1][2]
    assert again["folder"] == result["folder"]
    assert hub.sent["model-00001-of-00002.safetensors"] == len(WEIGHTS)  # once


def test_original_only_when_there_is_nothing_else(tmp_path: Path) -> None:
    files = {"README.md": b"", "original/config.json": b"{}", "original/model.safetensors": b"weights"}
    with FakeHub(REPOSITORY, files) as hub:
        [result] = resolve(tmp_path, {}, HF_ENDPOINT=hub.url)
    assert names(result["folder"]) == {"original/config.json", "original/model.safetensors"}


def test_token_revision_and_missing(tmp_path: Path) -> None:
    with FakeHub(REPOSITORY, PUBLISHED, token="hf_secret") as hub:
        [denied] = resolve(tmp_path, {}, HF_ENDPOINT=hub.url)
        asked = {"revision": "v9"}, {"model": "someone/else"}, {"download_dir": str(tmp_path / "weights")}
        revision, missing, granted = resolve(tmp_path, *asked, HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
    assert "HF_TOKEN" in denied["error"]
    assert "'v9'" in revision["error"]
    assert "someone/else" in missing["error"]
    assert "not on the hub" in missing["error"]
    assert granted["folder"].startswith(str(tmp_path / "weights"))


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The client writes in chunks of 10 MB; the connection breaks in the second one."""
    large = WEIGHTS * 12
    with FakeHub(REPOSITORY, {**PUBLISHED, "model-00001-of-00002.safetensors": large}) as hub:
        hub.cut_after = 11_000_000
        [result] = resolve(tmp_path, {}, HF_ENDPOINT=hub.url)
    assert "error" not in result, result
    assert (Path(result["folder"]) / "model-00001-of-00002.safetensors").read_bytes() == large
    sent = hub.sent["model-00001-of-00002.safetensors"]
    assert len(large) < sent < len(large) + 1_500_000  # only the unwritten part came twice


def test_offline_serves_the_cache_or_says_so(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--someone--small-gpt-oss"
    snapshot = cached / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"weights")
    asked = {}, {"model": "someone/else"}, {"model": "white space/model"}
    found, missing, invalid = resolve(tmp_path, *asked, HF_HUB_OFFLINE="1")
    assert Path(found["folder"]) == snapshot
    assert "HF_HUB_OFFLINE" in missing["error"]
    assert "only gpt-oss is served" in missing["error"]
    assert "neither a folder nor a hub id" in invalid["error"]


def test_an_unreachable_hub_is_explained(tmp_path: Path) -> None:
    [found] = resolve(tmp_path, {}, HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot be reached" in found["error"]


def test_folders(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize(
    "name",
    [
        "./absent", "/absent/folder", "~/absent-folder", "a/b/c", "~nobody-of-this-name/model", "a" * 300,
        "/absent/" + "a" * 300,
    ],
)  # fmt: skip
def test_folders_that_are_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^model '{name}': "):
        resolve_model(name)


def test_a_draft_head(tmp_path: Path) -> None:
    """Weights in any safetensors file; no family check, which is of models."""
    files = {
        "config.json": json.dumps({"model_type": "llama"}).encode(),
        "head.safetensors": WEIGHTS,
        "pytorch_model.bin": b"not needed",
    }
    code = CHILD.replace("resolve_model", "resolve_head")
    with FakeHub(REPOSITORY, files) as hub:
        asked = {}, {"model": "someone/else"}
        found, missing = resolve(tmp_path / "home", *asked, code=code, HF_ENDPOINT=hub.url)
    folder = Path(found["folder"])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "head.safetensors"]
    assert found["torch"] is False
    assert "draft head 'someone/else': no folder of that name, and not on the hub" in missing["error"]
    assert resolve_head(str(folder)) == folder.resolve()
    with pytest.raises(ConfigError, match="is a folder, which has no revisions"):
        resolve_head(str(folder), revision="v2")
