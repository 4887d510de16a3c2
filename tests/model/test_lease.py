"""Two servers that start together download the weights into their common folder once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

from tests.model.fake_hub import FakeHub, hub_environment
from tests.support.event_loop import wait_until

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


def pod_of(folder: Path, hub: FakeHub) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a pod. It makes the file ``waits`` when it waits."""
    environment = hub_environment(folder / "home", HF_ENDPOINT=hub.url)
    return [sys.executable, "-c", POD, str(folder / "waits")], environment


def test_two_pods_download_once(tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    with FakeHub(REPOSITORY, FILES) as hub:
        hub.gate = threading.Event()
        pod, settings = pod_of(tmp_path, hub)
        pods = [subprocess.Popen(pod, env=settings, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        try:
            wait_until(lambda: hub.asked["model.safetensors"] >= 2 or waits.exists(), "both pods")
            hub.gate.set()
            folders = {each.communicate(timeout=100)[0].strip() for each in pods}
        finally:
            for each in pods:
                each.kill()
                each.wait()
    assert hub.sent["model.safetensors"] == len(WEIGHTS)
    [folder] = folders
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert list(tmp_path.rglob("*.lease")) == []


def test_a_download_goes_on_after_a_killed_process_and_where_nothing_can_be_locked(tmp_path: Path) -> None:
    """A file in the place of the folder of locks acts as a volume that is only read does, for root too."""
    locks = tmp_path / "home" / "hub" / ".locks"
    lease = locks / f"models--{REPOSITORY.replace('/', '--')}" / "download.lease"
    lease.parent.mkdir(parents=True)
    killed = (
        "import filelock, os, sys; held = filelock.SoftFileLease(sys.argv[1]); held.acquire(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", killed, str(lease)], check=False, timeout=100)
    assert lease.exists()
    with FakeHub(REPOSITORY, FILES) as hub:
        pod, settings = pod_of(tmp_path, hub)
        subprocess.run(pod, env=settings, check=True, timeout=100)
        assert not lease.exists()
        shutil.rmtree(locks)
        locks.touch()
        subprocess.run(pod, env=settings, check=True, timeout=100)
