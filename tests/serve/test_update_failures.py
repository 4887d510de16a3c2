"""Weight updates that fail, over HTTP, with trainers that are killed: the old weights answer with the same bits.

Each case of ``tests/serve/engine/test_weight_update.py`` runs within one process; here are those that need a
server, and one of each kind.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from chorale.model.demo import ensure_demo
from chorale.model.safetensors_file import SafetensorsFile
from tests.support.served import Served, serving

TRAINER = """
import sys, time, urllib.request
url, *steps = sys.argv[1:]
for step in steps:
    path, _, body = step.partition(" ")
    request = urllib.request.Request(url + path, body.encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()
print("done", flush=True)
time.sleep(600)
"""
WRITER = "import sys; open(sys.argv[2], 'wb').write(open(sys.argv[1], 'rb').read())"
Q = "model.layers.0.self_attn.q_proj.weight"


class Rig:
    """A server, and the new weights of its attention."""

    def __init__(self, server: Served, folder: Path) -> None:
        self.server, self.folder = server, folder
        file = SafetensorsFile(ensure_demo() / "model.safetensors")
        names = [name for name in file.entries if "self_attn" in name]
        self.tensors = {name: file.tensor(name).clone() * 0.9 for name in names}
        self.good = self.write("good", {})

    def write(self, name: str, change: dict[str, torch.Tensor | None]) -> Path:
        path = self.folder / f"{name}.safetensors"
        tensors = {**self.tensors, **change}
        save_file({each: tensor for each, tensor in tensors.items() if tensor is not None}, path)
        return path

    def post(self, path: str, body: Any = None) -> int:
        return self.server.ask(path, body or {})[0]

    def answer(self) -> Any:
        asked = {"prompt": [5, 6, 7, 1000], "max_tokens": 24, "seed": 3, "logprobs": 2, "ignore_eos": True}
        status, body = self.server.ask("/v1/completions", {"model": "demo", "temperature": 1, **asked})
        return [(each["text"], each["logprobs"]) for each in body["choices"]] if status == 200 else status

    def begin(self) -> None:
        assert self.post("/pause?mode=keep") == 200
        assert self.post("/init_weight_transfer_engine", {"init_info": {}}) == 200
        assert self.post("/start_weight_update") == 200

    def send(self, path: Path | str) -> int:
        return self.post("/update_weights", {"update_info": {"path": str(path)}})

    def update(self, path: Path) -> int:
        """Makes an update as a trainer does that stops at the first error."""
        self.begin()
        status = self.send(path)
        return status if status != 200 else self.post("/finish_weight_update")

    def version(self) -> str:
        return str(self.server.ask("/weight_info")[1]["weight_version"])


def killed_trainer(rig: Rig, *steps: str) -> int:
    """A trainer is killed after its last step. Returns the status of the step that another one tries."""
    rig.post("/init_weight_transfer_engine", {"init_info": {}})
    steps = tuple(step.replace("GOOD", str(rig.good)) for step in steps)
    command = [sys.executable, "-c", TRAINER, rig.server.url, *steps]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "done\n"
        trainer.kill()
    rig.post("/resume")
    return rig.post("/finish_weight_update")


def killed_engine(rig: Rig, *, sends: bool) -> int:
    rig.begin()
    if sends:
        assert rig.send(rig.good) == 200
    kill_engine(rig)
    return rig.post("/finish_weight_update")


def kill_engine(rig: Rig) -> None:
    server, [killed] = rig.server, rig.server.engine_pids()
    os.kill(killed, signal.SIGKILL)
    server.wait_until("another engine", lambda: server.engine_pids() not in ([], [killed]))
    server.wait_until("it is ready", lambda: server.ask("/ready")[0] == 200)


def file_of(change: dict[str, Callable[[torch.Tensor], torch.Tensor] | None]) -> Callable[[Rig], int]:
    def run(rig: Rig) -> int:
        changed = {name: f and f(rig.tensors.get(name, torch.ones(1))) for name, f in change.items()}
        return rig.update(rig.write("bad", changed))

    return run


def full_disk(rig: Rig) -> int:
    """The trainer cannot write more than a part of the file, and reports it all the same."""
    path = rig.folder / "part.safetensors"
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (10**6, 10**6))
    command = [sys.executable, "-c", WRITER, rig.good, path]
    assert subprocess.run(command, preexec_fn=limit, stderr=subprocess.DEVNULL).returncode != 0
    assert 0 < path.stat().st_size < rig.good.stat().st_size
    return rig.update(path)


def second(rig: Rig, path: str, body: Any = None) -> int:
    """A request between start and finish; then the update is given up."""
    rig.begin()
    return rig.post(path, body)


def shut_down(rig: Rig) -> int:
    assert second(rig, "/shutdown_weight_transfer_engine") == 200
    return rig.send(rig.good)


PAUSE, START = "/pause?mode=keep {}", "/start_weight_update {}"
SEND = '/update_weights {"update_info": {"path": "GOOD"}}'
FAILURES: dict[str, Callable[[Rig], int]] = {
    "trainer killed after pause": lambda rig: killed_trainer(rig, PAUSE),
    "trainer killed after start": lambda rig: killed_trainer(rig, PAUSE, START),
    "trainer killed after sending": lambda rig: killed_trainer(rig, PAUSE, START, SEND),
    "trainer killed after start without a pause": lambda rig: killed_trainer(rig, START),
    "trainer killed after a pause in the update": lambda rig: killed_trainer(rig, START, SEND, PAUSE),
    "engine killed after start": partial(killed_engine, sends=False),
    "engine killed after sending": partial(killed_engine, sends=True),
    "full disk": full_disk,
    "wrong shape": file_of({Q: lambda tensor: tensor[1:].clone()}),
    "missing tensor": file_of({Q: None}),
    "wrong type": file_of({Q: lambda tensor: tensor.to(torch.uint8)}),
    "unknown name": file_of({"model.layers.99.x": lambda tensor: tensor}),
    "NaN": file_of({Q: lambda tensor: tensor * torch.nan}),
    "no file": lambda rig: rig.update(rig.folder / "none"),
    "a folder without weights": lambda rig: rig.update(rig.folder),
    "a path outside": lambda rig: rig.update(ensure_demo()),
    "nothing sent": lambda rig: second(rig, "/finish_weight_update"),
    "a second start": lambda rig: second(rig, "/start_weight_update"),
    "a sleep": lambda rig: second(rig, "/sleep"),
    "a body that is no object": lambda rig: second(rig, "/update_weights", {"update_info": [1]}),
    "another back end's info": lambda rig: second(rig, "/update_weights", {"update_info": {"names": []}}),
    "the back end shut down": shut_down,
}


@pytest.mark.slow
def test_after_each_failure_the_old_weights_answer(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    config = f'{{"backend": "checkpoint", "allowed_folders": ["{folder}"]}}'
    options = ("--weight-transfer-config", config, "--enable-sleep-mode")
    with serving("demo", tmp_path, *options) as server:
        rig = Rig(server, folder)
        wanted = rig.answer()
        for name, fail in FAILURES.items():
            status = fail(rig)
            rig.post("/resume")
            assert (name, status in (400, 409), rig.answer()) == (name, True, wanted)
            assert rig.version() == "default"
        print(f"{len(FAILURES)} failures, {len(FAILURES)} answers equal")
        assert rig.update(rig.good) == rig.post("/resume") == 200
        updated = rig.answer()
        assert updated != wanted
        kill_engine(rig)
        assert (rig.answer(), rig.version()) == (503, "default")
        assert rig.update(rig.good) == rig.post("/resume") == 200
        assert rig.answer() == updated
