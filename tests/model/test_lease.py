"""Two servers that start together download the weights into their common folder once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from chorale.model import cache as module
from chorale.model.cache import lease
from tests.support.fake_hub import FakeHub

REPOSITORY, WEIGHTS = "someone/small-gpt-oss", bytes(range(256)) * 4096
FILES = {"config.json": b'{"model_type": "gpt_oss"}', "model.safetensors": WEIGHTS}
# A pod: locks of files hold on its own machine only, as on some network file systems.
POD = """
import fcntl, pathlib, sys
fcntl.flock = lambda *_: None
from chorale.model.hub import resolve_model
def report(phase, fraction, message):
    if "another process" in message:
        pathlib.Path(sys.argv[1]).touch()
print(resolve_model("someone/small-gpt-oss", progress=report))
"""


def test_two_pods_download_once(tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    with FakeHub(REPOSITORY, FILES) as hub:
        hub.gate = threading.Event()
        settings = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        pods = [
            subprocess.Popen(
                [sys.executable, "-c", POD, str(waits)],
                env={**clean, **settings},
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        try:
            deadline = time.monotonic() + 100
            while hub.asked["model.safetensors"] < 2 and not waits.exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            hub.gate.set()
            folders = {pod.communicate(timeout=100)[0].strip() for pod in pods}
        finally:
            for pod in pods:
                pod.kill()
                pod.wait()
    assert hub.sent["model.safetensors"] == len(WEIGHTS)
    [folder] = folders
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert list(tmp_path.rglob("*.lease")) == []


def test_a_lease_is_taken_over_when_its_holder_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT", 3.0)
    monkeypatch.setattr(module, "BEAT", 0.05)
    monkeypatch.setattr(module, "POLL", 0.02)
    path, waited = tmp_path / "locks" / "lease", []
    path.parent.mkdir()
    path.write_text("token-of-a-killed-process 7")
    with lease(path, lambda: waited.append(1)):
        assert waited
        ours = path.read_text()
        others = threading.Thread(target=lambda: _take(path, taken))
        taken: list[str] = []
        others.start()
        others.join(2 * module.LIMIT)
        assert taken == []  # this holder counts
        assert path.read_text() != ours
    others.join(30)
    assert taken == ["taken"]
    assert not path.exists()


def _take(path: Path, taken: list[str]) -> None:
    with lease(path, lambda: None):
        taken.append("taken")


def test_where_no_file_can_be_made_nothing_is_waited_for(tmp_path: Path) -> None:
    """As on a volume that is only read; a file in the place of the folder does the same for root."""
    (tmp_path / "file").touch()
    waited: list[int] = []
    with lease(tmp_path / "file" / "under" / "lease", lambda: waited.append(1)):
        pass
    assert waited == []
