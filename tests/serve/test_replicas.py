"""Several engines of one supervisor, with a fake device: health, metrics, failures, devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chorale.client.base import EngineInfo, EngineStatus
from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.machine import devices, platforms
from chorale.machine.devices import replica_environments, visible_ids
from chorale.serve import precheck
from chorale.serve.bootstrap import EngineStart, replicate
from chorale.serve.supervisor import ReplicaStatuses
from tests.serve.test_supervisor import Supervised, serve

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ONE_HTTP = {"data_parallel_size": 2, "api_server_count": 1}
TWO_HTTP = {"data_parallel_size": 2, "api_server_count": 2}


def metric(server: Supervised, name: str) -> dict[str, float]:
    """Returns the values of a metric by engine. The parser is as strict as that of Prometheus."""
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(server.metrics())
        for sample in family.samples
        if sample.name == name
    }


@on_linux
@pytest.mark.parametrize(
    ("fault", "server", "code", "deaths"),
    [({"refuse": "no such tensor"}, {}, 2, 0), ({"crash": "no such device"}, ONE_HTTP, 1, 2)],
)
def test_the_server_exits_when_all_engines_have_failed(
    fault: dict[str, str], server: dict[str, int], code: int, deaths: int
) -> None:
    """A configuration that cannot run is not tried again; after a crash, each engine is started once more."""
    limits = {"backoff": 0.01, "max_failed_starts": 2}
    with serve(behaviour=fault, server=server, limits=limits) as s:
        assert s.ended() == code
        s.wait_until("the failure is told", lambda: "failed" in s.states)
        failed = next(event for event in s.events if event.get("state") == "failed")
        assert "no such" in failed["message"]
        assert s.states.count("failed") == 1
        assert sum("restarting" in event.get("message", "") for event in s.events) == deaths


@on_linux
def test_the_server_serves_although_one_engine_cannot_start() -> None:
    behaviour = {"crash": "out of memory", "faulty": "engine-1"}
    with serve(behaviour=behaviour, server=TWO_HTTP, limits={"backoff": 0.01}) as s:
        s.until_ready()
        s.wait_until("the operator is notified", lambda: "ready" in s.states)
        asked = {"prompt": [1] * 40, "max_tokens": 4, "ignore_eos": True}
        assert s.ask("/v1/completions", asked)[0] == 200

        def states() -> list[str]:
            return [each["status"] for each in s.ask("/health")[1]["engines"]]

        for _ in range(4):  # any process may answer
            s.wait_until("the failure is shown", lambda: states() == ["ready", "failed"])
            status, body = s.ask("/health")
            assert (status, body["status"]) == (200, "ready")
            assert "out of memory" in body["engines"][1]["message"]
            assert s.ask("/ready")[0] == 200
            assert metric(s, "chorale:engine_up") == {"0": 1, "1": 0}
        restarts = {"0": 0.0, "1": 4.0}  # after five failed starts
        s.wait_until("four restarts", lambda: metric(s, "chorale:engine_restarts_total") == restarts)
        lost = [e["message"] for e in s.events if e.get("state") == "dead"]
        assert lost[-1].startswith("engine 1: ")
        assert lost[-1].endswith("; the other engines keep running")
        assert "failed" not in s.states
        s.process.terminate()
        assert s.ended() == 0


# --------------------------------------------------------------------------- the operator's view

INFO = EngineInfo(model="m", max_model_len=100, max_num_seqs=4, num_kv_tokens=1000)


class Told:
    def __init__(self, count: int) -> None:
        self.heard: list[tuple[str, str]] = []
        self.infos: list[EngineInfo] = []
        statuses = ReplicaStatuses(count, self.hear)
        self.say = [statuses.callback(index) for index in range(count)]

    def hear(self, status: EngineStatus, info: EngineInfo | None) -> None:
        self.heard.append((status.state, status.message or status.phase))
        if info is not None:
            self.infos.append(info)

    def tell(self, index: int, state: Any, message: str = "", info: EngineInfo | None = None) -> None:
        say = self.say[index]
        assert say is not None
        say(EngineStatus(state, message=message), info)


def test_ready_is_reported_once_all_are_ready_and_deaths_name_the_engine() -> None:
    told = Told(2)
    told.tell(0, "loading", "a")
    told.tell(1, "loading", "b")  # only the first loading engine is shown
    told.tell(0, "ready", info=INFO)
    told.tell(1, "loading", "c")
    told.tell(1, "ready", info=EngineInfo(model="m", max_model_len=50, max_num_seqs=9, num_kv_tokens=2000))
    assert told.heard == [("loading", "a"), ("loading", "c"), ("ready", "")]
    (info,) = told.infos  # limits that every engine supports
    assert (info.max_model_len, info.max_num_seqs, info.num_kv_tokens) == (50, 4, 1000)
    told.heard.clear()
    told.tell(1, "dead", "killed")
    told.tell(1, "loading", "again")
    told.tell(1, "ready", info=INFO)
    assert told.heard == [("dead", "engine 1: killed"), ("ready", "")]
    told.heard.clear()
    told.tell(0, "failed", "no memory")
    told.tell(1, "failed", "no memory either")
    assert told.heard == [
        ("dead", "engine 0: no memory; the other engines keep running"), ("failed", "no memory either")
    ]  # fmt: skip


# --------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (None, None),
        ("", []),
        ("0,1,2", ["0", "1", "2"]),
        (" 3 , 1", ["3", "1"]),
        ("GPU-8932f937,GPU-1", ["GPU-8932f937", "GPU-1"]),
        ("MIG-GPU-8932/1/0,MIG-7", ["MIG-GPU-8932/1/0", "MIG-7"]),
        ("0,-1,2", ["0"]),
    ],
)
def test_visible_ids_keep_their_spelling_and_order(given: str | None, ids: list[str] | None) -> None:
    assert visible_ids({} if given is None else {"CUDA_VISIBLE_DEVICES": given}) == ids


def test_each_replica_environment_selects_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "why_no_cuda", lambda: None)
    monkeypatch.setattr(platforms, "gpu_count", lambda: 4)
    config = EngineConfig(device="cuda")
    name = "CUDA_VISIBLE_DEVICES"
    assert replica_environments(config, 2, {}) == [{name: "0"}, {name: "1"}]
    assert replica_environments(config, 2, {name: "3,GPU-1"}) == [{name: "3"}, {name: "GPU-1"}]
    with pytest.raises(ConfigError, match=r"4 engines need 4 GPUs, and 2 .*use --data-parallel-size 2"):
        replica_environments(config, 4, {name: "3,GPU-1"})
    ranks = EngineConfig(tensor_parallel_size=2)
    assert replica_environments(ranks, 2, {name: "3,2,1,0"}) == [{name: "3,2"}, {name: "1,0"}]
    assert replica_environments(EngineConfig(device="cpu"), 2, {}) is None
    chosen = EngineConfig(tensor_parallel_size=2, device_ids=(3, "1"))
    assert replica_environments(chosen, 1, {}) == [{name: "3,1"}]
    assert replica_environments(chosen, 1, {name: "7,6,5,GPU-4"}) == [{name: "GPU-4,6"}]
    named = EngineConfig(device_ids=("GPU-a", "GPU-b"))
    assert replica_environments(named, 2, {name: "7"}) == [{name: "GPU-a"}, {name: "GPU-b"}]
    for config, number, words in (
        (chosen, 2, "need 4 GPUs, and 2"),
        (EngineConfig(device_ids=(4,)), 1, "4 GPUs are"),
    ):
        with pytest.raises(ConfigError, match=f"--device-ids.*{words}|{words}.*--device-ids"):
            replica_environments(config, number, {})
    monkeypatch.setattr(platforms, "why_no_cuda", lambda: "no driver")
    assert replica_environments(EngineConfig(), 2, {}) is None
    with pytest.raises(ConfigError, match="--device-ids"):
        replica_environments(chosen, 1, {})


def test_each_replica_has_its_own_directory_name_and_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = EngineStart(directory=str(tmp_path), config=EngineConfig(device="cpu"), parent_pid=1)
    assert replicate(start, 1) == (start,)
    one, two = replicate(start, 2)
    assert [each.directory for each in (one, two)] == [f"{tmp_path}/0", f"{tmp_path}/1"]
    assert Path(one.directory).stat().st_mode & 0o777 == 0o700
    assert (one.name, two.name) == ("engine-0", "engine-1")
    assert one.config.host_share == two.config.host_share == 2
    assert len(one.prefix_secret) == 16
    assert one.prefix_secret == two.prefix_secret
    monkeypatch.setattr(platforms, "why_no_cuda", lambda: None)
    monkeypatch.setattr(platforms, "gpu_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    other = tmp_path / "gpus"
    other.mkdir()
    start = EngineStart(directory=str(other), config=EngineConfig(), parent_pid=1)
    one, two = replicate(start, 2)
    assert (one.environment, two.environment) == (
        {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}
    )  # fmt: skip
    assert one.config.host_share == 1
    [only] = replicate(msgspec.structs.replace(start, config=EngineConfig(device_ids=("1",))), 1)
    assert only.environment == {"CUDA_VISIBLE_DEVICES": "1"}


def test_ranks_on_mig_instances_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "why_no_cuda", lambda: None)
    monkeypatch.setattr(platforms, "gpu_count", lambda: 1)  # CUDA shows only one MIG instance
    instances = {"CUDA_VISIBLE_DEVICES": "MIG-7d3,MIG-9c1"}
    ranks = EngineConfig(tensor_parallel_size=2)
    assert len(replica_environments(EngineConfig(), 2, instances) or ()) == 2
    with pytest.raises(ConfigError, match=r"cannot use MIG instances \(MIG-7d3\).*--data-parallel-size"):
        replica_environments(ranks, 1, instances)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", instances["CUDA_VISIBLE_DEVICES"])
    with pytest.raises(ConfigError, match=r"cannot use MIG instances \(MIG-7d3\)"):
        precheck.check_device(ranks)


def test_a_gpu_that_is_named_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "why_no_cuda", lambda: None)
    twice = {"CUDA_VISIBLE_DEVICES": "0,1,0"}
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=0,1,0 names 0 twice"):
        replica_environments(EngineConfig(), 2, twice)
    with pytest.raises(ConfigError, match="names 0 twice"):
        devices.check_visible(2, environment=twice)
    devices.check_visible(1, environment=twice)  # a single-GPU engine uses the first
