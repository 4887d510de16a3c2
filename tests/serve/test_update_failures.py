"""Weight updates that fail over HTTP, trainers and engines that are killed: the old weights answer with the
same bits. ``tests/serve/engine/test_weight_update.py`` has the faults of files and of the order of calls."""

from __future__ import annotations

import os
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
import sys, time, urllib.request as http
for step in sys.argv[2:]:
    path, body = step.split(" ", 1)
    http.urlopen(http.Request(sys.argv[1] + path, body.encode(), {"Content-Type": "application/json"}))
print("done", flush=True)
time.sleep(600)
"""
Q = "model.layers.0.self_attn.q_proj.weight"


class Rig:
    """A server, and the new weights of its attention."""

    def __init__(self, server: Served, folder: Path) -> None:
        self.server, self.folder = server, folder
        file = SafetensorsFile(ensure_demo() / "model.safetensors")
        self.tensors = {name: file.tensor(name) * 0.9 for name in file.entries if "self_attn" in name}
        self.good = self.write("good", {})

    def write(self, name: str, change: dict[str, torch.Tensor]) -> Path:
        path = self.folder / f"{name}.safetensors"
        save_file({**self.tensors, **change}, path)
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

    def update(self, path: Path) -> int:
        """Makes an update. Returns the status of the first error, or 200."""
        self.begin()
        sent = self.send(path)
        return sent if sent != 200 else self.post("/finish_weight_update")

    def send(self, path: Path) -> int:
        return self.post("/update_weights", {"update_info": {"path": str(path)}})

    def kill_engine(self) -> None:
        [killed] = self.server.engine_pids()
        os.kill(killed, signal.SIGKILL)
        self.server.wait_until("another", lambda: self.server.engine_pids() not in ([], [killed]))
        self.server.wait_until("it is ready", lambda: self.server.ask("/ready")[0] == 200)


def killed_trainer(rig: Rig, *steps: str) -> int:
    """A trainer is killed after its last step. Returns the status of a step that another one tries."""
    rig.post("/init_weight_transfer_engine", {"init_info": {}})
    steps = tuple(step.replace("GOOD", str(rig.good)) for step in steps)
    command = [sys.executable, "-c", TRAINER, rig.server.url, *steps]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.read(5) == "done\n"
        trainer.kill()
    rig.post("/resume")
    return rig.post("/finish_weight_update")


def killed_engine(rig: Rig, *, sends: bool) -> int:
    rig.begin()
    assert not sends or rig.send(rig.good) == 200
    rig.kill_engine()
    return rig.post("/finish_weight_update")


def within(rig: Rig, body: Any) -> int:
    """A request with this body between start and finish; then the update is given up."""
    rig.begin()
    return rig.post("/update_weights", body)


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
    "a body that is no object": lambda rig: within(rig, {"update_info": [1]}),
    "another back end's info": lambda rig: within(rig, {"update_info": {"names": []}}),
}


@pytest.mark.slow
def test_after_each_failure_the_old_weights_answer(tmp_path: Path) -> None:
    """And after a crash, updated weights are not replaced by those of the start without an error."""
    config = f'{{"backend": "checkpoint", "allowed_folders": ["{tmp_path}"]}}'
    with serving("demo", tmp_path, "--weight-transfer-config", config, "--enable-sleep-mode") as server:
        rig = Rig(server, tmp_path)
        wanted = rig.answer()
        for name, fail in FAILURES.items():
            status = fail(rig)
            rig.post("/resume")
            assert (name, status in (400, 409), rig.answer()) == (name, True, wanted)
            assert server.ask("/weight_info")[1] == {"weight_version": "default"}
        assert rig.update(rig.good) == rig.post("/resume") == 200
        updated = rig.answer()
        assert updated != wanted
        rig.kill_engine()
        assert rig.answer() == 503
        assert rig.update(rig.good) == rig.post("/resume") == 200
        assert rig.answer() == updated
