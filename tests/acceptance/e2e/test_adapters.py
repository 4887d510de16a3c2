"""``chorale serve`` with adapters that are loaded while it serves."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from benchmarks.serving import adapters as churn
from chorale.model.config import ModelConfig
from chorale.model.demo import ensure_demo
from tests.acceptance.e2e.test_replicas import both_ready, by_engine
from tests.support.device.lora import write_adapter
from tests.support.served import Served, at_once, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc"),
]


def answer(server: Served, model: str) -> str:
    body = {"model": model, "prompt": "The sum of 2 and 3 is", "max_tokens": 12, "temperature": 0}
    status, found = server.ask("/v1/completions", body | {"ignore_eos": True})
    assert status == 200, found
    return str(found["choices"][0]["text"])


def test_adapters_reach_all_engines_and_outlive_a_kill_during_sleep(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", ModelConfig.load(ensure_demo()), "attention", 3)
    flags = ["--enable-lora", "--allow-runtime-lora-updating", "--lora-dirs", str(tmp_path)]
    flags += ["--enable-sleep-mode", "--api-server-count", "1"]
    with serving("demo", tmp_path, "-dp", "2", *flags) as server:
        base = answer(server, "demo")
        churn.Load(server.url, tmp_path, 0.0).post(
            "/v1/load_lora_adapter", lora_name="a", lora_path=str(tmp_path / "a")
        ).close()
        ask = partial(answer, server, "a")
        (expected,) = set(at_once(*[ask] * 6))
        assert expected != base
        assert min(by_engine(server, "vllm:generation_tokens_total").values()) > 0
        for level in (1, 2):
            assert server.ask(f"/sleep?level={level}", {})[0] == 200
            pids = server.engine_pids()
            os.kill(pids[0], signal.SIGKILL)
            server.wait_until("a successor", lambda old=pids: set(server.engine_pids()) - set(old))
            both_ready(server)
            assert server.ask("/wake_up", {})[0] == 200
            assert set(at_once(*[ask] * 6)) == {expected}
        assert answer(server, "demo") == base


@pytest.mark.parametrize("options", [[], ["-tp", "2"]], ids=["one rank", "two ranks"])
def test_adapters_come_and_go_under_load(options: list[str]) -> None:
    assert churn.main(["--minutes", "0.3", "--adapters", "12", "--clients", "3", "--", *options]) == 0
