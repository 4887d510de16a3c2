"""Errors of GPUs, by the texts that CUDA, torch, Triton and NCCL give them: which GPU, and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chorale.errors import ConfigError, EngineError, GpuError, RequestError
from chorale.machine import platforms
from chorale.parallel.communicator import CommunicationError
from chorale.runtime.device import CudaDevice, label_of, open_device
from chorale.runtime.gpu_faults import explain, explained

PLACE = "GPU 1 (NVIDIA H200, GPU-1a2b, 00000000:1b:00.0)"
ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call."

HARDWARE = [
    "CUDA error: uncorrectable ECC error encountered" + ADVICE,
    "CUDA driver error: CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA error: uncorrectable NVLink error detected during the execution" + ADVICE,
    "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
    "CUDA error: hardware stack error" + ADVICE,
]
KERNELS = [
    "CUDA error: an illegal memory access was encountered" + ADVICE,
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: device-side assert triggered",
]


@pytest.mark.parametrize("text", HARDWARE)
def test_a_fault_of_the_hardware_says_what_an_operator_does(text: str) -> None:
    error = explain(RuntimeError(text), "step 7 failed", PLACE)
    assert isinstance(error, GpuError)
    assert error.message.startswith(f"step 7 failed: {PLACE} has ") or "does not answer" in error.message
    assert "nvidia-smi --gpu-reset -i 00000000:1b:00.0" in error.message
    assert "drain the node" in error.message
    assert text.splitlines()[0] in error.message
    assert "asynchronously" not in error.message


@pytest.mark.parametrize("text", KERNELS)
def test_a_kernel_that_was_stopped_says_where_the_cause_is_logged(text: str) -> None:
    error = explain(RuntimeError(text), "step 7 failed", PLACE)
    assert type(error) is EngineError
    assert error.message.startswith(f"step 7 failed: {PLACE} stopped a kernel")
    assert "dmesg | grep Xid" in error.message


def test_memory_that_another_process_took() -> None:
    error = explain(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "load", PLACE)
    assert error is not None
    assert "CUDA_VISIBLE_DEVICES" in error.message
    assert "Tried to allocate 2 GiB" in error.message


def test_a_container_with_little_shared_memory() -> None:
    error = CommunicationError("the exchange between ranks failed: NCCL error in: ProcessGroupNCCL.cpp")
    last = "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888), error: No space"
    error.__cause__ = RuntimeError(f"NCCL error, unhandled system error\nLast error:\n{last}")
    found = explain(error, "ranks could not be connected", PLACE)
    assert found is not None
    assert "--shm-size=1g" in found.message
    assert not isinstance(found, GpuError)


def test_other_errors_and_other_devices_are_left_alone() -> None:
    assert explain(ValueError("a shape"), "step 7 failed", PLACE) is None
    assert explain(RuntimeError(HARDWARE[0]), "step 7 failed", "") is None  # a CPU
    assert explain(RequestError(HARDWARE[0]), "step 7 failed", PLACE) is None
    with pytest.raises(ValueError, match="a shape"), explained("step 7 failed", PLACE):
        raise ValueError("a shape")


def test_the_cause_of_an_exchange_counts() -> None:
    """NCCL reports the GPU's error as its own."""
    error = CommunicationError("the exchange between ranks failed")
    error.__cause__ = RuntimeError(HARDWARE[0])
    with pytest.raises(GpuError, match="GPU 1"), explained("a step failed", PLACE):
        raise error
    plain = CommunicationError("rank 1 did not take part in an all-reduce")
    assert explain(plain, "a step failed", PLACE) is None


# --------------------------------------------------------------------------- opening


class StandIn:
    """torch.cuda of a machine with GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str, broken: bool = False) -> None:
        self.names, self.broken = names, broken
        for name in ("is_available", "device_count", "get_device_name", "get_device_properties",
                     "set_device", "mem_get_info"):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(platforms, "why_no_cuda", lambda: None)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.names)

    def get_device_name(self, number: int) -> str:
        return self.names[number]

    def get_device_properties(self, number: int) -> Any:
        return SimpleNamespace(
            name=self.names[number], uuid="1a2b", pci_domain_id=0, pci_bus_id=27 + number, pci_device_id=0,
            major=9, minor=0,
        )  # fmt: skip

    def set_device(self, number: int) -> None:
        if self.broken:
            raise torch.AcceleratorError(HARDWARE[0])

    def mem_get_info(self, number: int) -> tuple[int, int]:
        return 100, 140


def test_a_device_has_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(monkeypatch, "NVIDIA H200", "NVIDIA H200")
    device = open_device("auto", rank=1, ranks=2)
    assert isinstance(device, CudaDevice)
    assert device.hardware.label == "GPU 1 (NVIDIA H200, GPU-1a2b, 00000000:1c:00.0)"
    assert device.hardware.uuid == "GPU-1a2b"
    assert device.hardware.capability == 90


def test_an_amd_gpu_gets_no_advice_about_nvidias_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(monkeypatch, "AMD Instinct MI300X", "AMD Instinct MI300X")
    monkeypatch.setattr("chorale.runtime.device.find_platform", lambda _: platforms.ROCM)
    device = open_device("rocm", rank=1, ranks=2)
    assert isinstance(device, CudaDevice)
    assert (device.hardware.kind, device.hardware.label, device.hardware.uuid) == ("rocm", "", "")
    assert explain(RuntimeError(HARDWARE[0]), "step 7 failed", device.hardware.label) is None


def test_an_old_torch_gives_a_shorter_label() -> None:
    assert label_of(0, SimpleNamespace(name="NVIDIA A10")) == ("GPU 0 (NVIDIA A10)", "")


def test_a_gpu_that_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(monkeypatch, "NVIDIA H200", broken=True)
    with pytest.raises(GpuError, match=r"the device cannot be opened: GPU 0 \(NVIDIA H200, GPU-1a2b"):
        open_device("cuda")


def test_ranks_on_mig_instances_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    StandIn(monkeypatch, "NVIDIA H200 MIG 1g.18gb")
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2 cannot use MIG instances .*MIG 1g.*use "
                                          "--data-parallel-size"):  # fmt: skip
        open_device("auto", rank=0, ranks=2)
    assert open_device("auto").hardware.name == "NVIDIA H200 MIG 1g.18gb"  # one rank
