"""GPU hardware faults: the engine is restarted a few times, and never on the CPU instead."""

from __future__ import annotations

import asyncio

import pytest

from chorale.machine.platforms import CUDA, NPU, Platform
from chorale.serve import engine_monitor
from chorale.serve.bootstrap import EXIT_CONFIG, EXIT_FAILED
from chorale.serve.watch import RestartPolicy, WatchLimits
from tests.support import PATIENCE
from tests.support.serve.fake_engine import PLACE, Behaviour
from tests.support.serve.harness import collect, expected, request, rig, until


async def test_the_engine_restarts_after_ecc_errors_until_the_monitor_gives_up() -> None:
    limits = WatchLimits(backoff=0.01, max_gpu_faults=3)
    async with rig(Behaviour(ecc_at_step=2), watch=limits) as r:
        for number in range(3):
            asked = request(f"short{number}", 1)  # the steps before the faulty one succeed
            assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}
            pid = r.pid
            with pytest.raises(Exception, match="engine failed"):
                await collect(r.client.submit(request(f"r{number}")))
            if number < 2:
                await until(lambda pid=pid: r.monitor.pid not in (None, pid), "a new process")
                await r.ready()
        assert await asyncio.wait_for(asyncio.shield(r.running), PATIENCE) == EXIT_FAILED
        died = [status.message for status, _ in r.told if status.state == "dead"]
        assert len(died) == 2
        assert all(f"{PLACE} has an uncorrectable memory error (ECC)" in message for message in died)
        last = r.told[-1][0]
        assert last.state == "failed"
        assert "a GPU's hardware failed 3 times in 60 min, no restart" in last.message
        assert PLACE in last.message
        assert "nvidia-smi --gpu-reset -i 00000000:1b:00.0" in last.message
        assert "drain the node" in last.message
        assert "TORCH_USE_CUDA_DSA" not in last.message  # advice for kernel developers only


def test_only_faults_of_the_last_hour_count() -> None:
    policy = RestartPolicy(WatchLimits())
    assert policy.add(0.0, was_ready=True, is_gpu=True) == 0.1
    assert policy.add(1.0, was_ready=True, is_gpu=True) == 0.1
    assert policy.add(2.0, was_ready=True) == 0.1  # a crash of another kind
    assert policy.add(3601.5, was_ready=True, is_gpu=True) == 0.1
    assert policy.add(3602.0, was_ready=True, is_gpu=True) == 0.1
    assert policy.add(3603.0, was_ready=True, is_gpu=True) is None


@pytest.mark.parametrize(
    ("platform", "kind", "named", "signs"),
    [
        (CUDA, "cuda", "NVIDIA H200", ["PyTorch finds no CUDA device", "Xid 79"]),
        (NPU, "npu", "Ascend910B", ["if the driver does not list it any more"]),
    ],
    ids=["cuda", "npu"],
)
async def test_a_lost_accelerator_is_named_and_not_replaced_by_another_device(
    platform: Platform, kind: str, named: str, signs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_monitor, "find_platform", lambda device: platform)
    async with rig(Behaviour(device=named, missing_once_ready=True)) as r:
        assert r.monitor._start.config.device == kind  # it was "auto"
        r.kill()
        assert await asyncio.wait_for(asyncio.shield(r.running), PATIENCE) == EXIT_CONFIG
        message = r.told[-1][0].message
        assert f"This engine ran on {named} before" in message
        assert all(sign in message for sign in signs)


async def test_an_engine_on_the_cpu_keeps_the_device_auto() -> None:
    async with rig(Behaviour()) as r:
        assert r.monitor._start.config.device == "auto"
