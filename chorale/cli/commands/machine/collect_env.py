"""``chorale collect-env``: versions and hardware for a bug report, without secrets and paths."""

from __future__ import annotations

import os
import platform

from chorale.machine import facts as machine
from chorale.machine.hardware import available_memory, cpu_count, total_memory
from chorale.runtime.sizing.memory import gib
from chorale.version import __version__

PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "huggingface-hub", "starlette", "uvicorn", "uvloop"),
    *("httptools", "pydantic", "msgspec", "pyzmq", "tiktoken", "llguidance", "httpx2", "prometheus-client"),
    *("rich", "PyYAML", "transformers", "openai", "openai-harmony"),
)
# Variables that change behaviour. For ``SECRETS``, only whether they are set is printed.
VARIABLES = (
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TIKTOKEN_ENCODINGS_BASE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)
# Prefixes of variables that vendors' drivers and libraries read.
PREFIXES = ("HIP_", "ROCR_", "HSA_", "NCCL_", "RCCL_", "ASCEND_", "HCCL_", "PYTORCH_NPU_")
SECRETS = ("HF_TOKEN", "CHORALE_API_KEY", "VLLM_API_KEY")


def run(arguments: list[str]) -> int:
    if arguments:
        print("usage: chorale collect-env")
        return 0 if arguments[0] in ("-h", "--help") else 2
    total, available = total_memory(), available_memory()
    print(f"chorale:  {__version__}")
    print(f"python:   {platform.python_implementation()} {platform.python_version()}")
    print(f"system:   {platform.platform()}")
    print(f"cpu:      {machine.cpu_name()}, {cpu_count()} cores")
    print(f"memory:   {gib(available)} available of {gib(total)}")
    for index, gpu in enumerate(machine.gpus()):
        print(f"gpu {index}:    {gpu.name}, {gib(gpu.total_bytes)}, driver {gpu.driver}")
    for name in PACKAGES:
        print(f"{name}: {machine.version_of(name) or 'not installed'}")
    for name in (*VARIABLES, *sorted(name for name in os.environ if name.startswith(PREFIXES))):
        if name in os.environ:
            print(f"{name}={os.environ[name]}")
    for name in SECRETS:
        print(f"{name}: {'set' if os.environ.get(name) else 'not set'}")
    return 0
