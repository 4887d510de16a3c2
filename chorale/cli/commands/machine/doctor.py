"""``chorale doctor``: prints findings marked OK, WARN or FIX, with a remedy for each FIX.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from chorale.config.engine import VALID_SIZES
from chorale.errors import ChoraleError, install_hint
from chorale.kernels.cpu.build import BuildError, compiler
from chorale.kernels.cpu.library import library
from chorale.machine import facts as machine
from chorale.machine import links, nvidia_smi
from chorale.machine.devices import VISIBLE, visible_ids
from chorale.machine.hardware import available_memory, cpu_count, total_memory
from chorale.machine.platforms import find_platform
from chorale.runtime.sizing.memory import gib
from chorale.serve.fleet import version as ray_version
from chorale.tools.python.presence import check_daemon
from chorale.tools.python.sandbox import SandboxMissing
from chorale.tools.python.wasm import module as interpreter
from chorale.version import __version__

Finding = tuple[str, str, str]  # level, subject, detail
USAGE = (
    "usage: chorale doctor\n\nChecks this machine and suggests fixes. Exit code 1 if something must be fixed."
)
PORT = 8000


def run(arguments: list[str]) -> int:
    if arguments:
        print(USAGE)
        return 0 if arguments[0] in ("-h", "--help") else 2
    print(f"chorale {__version__}")
    findings = [finding for check in CHECKS for finding in check()]
    for level, what, detail in findings:
        print(f"{level:<5} {what:<12} {detail}")
    print("To check that this machine computes correct results: chorale selfcheck")
    return 1 if any(level == "FIX" for level, _, _ in findings) else 0


def check_python() -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    yield "OK", "python", version


def check_torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield "FIX", "torch", "not installed: pip install torch"
        return
    version = importlib.metadata.version("torch")
    yield "OK", "torch", version
    if machine.gpus() and "+cpu" in version:
        yield "FIX", "torch", "a CPU build, but this machine has a GPU: pip install --force-reinstall torch"


def check_gpu() -> Iterator[Finding]:
    found, platform = machine.gpus(), find_platform("auto")
    if not found and platform is not None:
        yield "WARN", "gpu", f"--device {platform.kind}, {platform.count()} found. {platform.state}"
    elif not found:
        yield "OK", "gpu", "none found: the CPU is used (slower)"
    for index, gpu in enumerate(found):
        free, total = gib(gpu.free_bytes), gib(gpu.total_bytes)
        level = "OK" if gpu.free_bytes > 0.8 * gpu.total_bytes else "WARN"
        yield level, f"gpu {index}", f"{gpu.name}, {free} free of {total}, driver {gpu.driver}"
        if level == "WARN" and (users := memory_users(gpu.uuid)):
            yield "WARN", f"gpu {index}", f"its memory is used by {users}"
    yield from check_health()
    yield from _several(found)


def check_ray() -> Iterator[Finding]:
    """Yields a line about Ray, which is optional."""
    version = ray_version.installed()
    if version is None:
        return
    try:
        warning = ray_version.check(version)
    except ChoraleError as error:
        yield "WARN", "ray", error.message
        return
    yield (
        ("OK" if warning is None else "WARN"),
        "ray",
        warning or f"{version}, for --data-parallel-backend ray",
    )


def memory_users(uuid: str) -> str:
    """Returns a list of at most five processes that use a GPU's memory, as text."""
    found = []
    for user in nvidia_smi.users(uuid)[:5]:
        size = f", {gib(user.num_bytes)}" if user.num_bytes else ""
        found.append(f"process {user.pid} ({user.name}{size})")
    return ", ".join(found)


def check_health() -> Iterator[Finding]:
    """Yields memory faults of the GPUs that the driver has counted."""
    for gpu in nvidia_smi.health():
        what, reset = f"gpu {gpu.index}", f"nvidia-smi --gpu-reset -i {gpu.index}, with nothing running on it"
        if gpu.remap_failed:
            yield "FIX", what, "its memory has failed rows and no spare ones left: have the GPU replaced"
        if gpu.action:
            yield "FIX", what, f"the driver recommends: {gpu.action} ({reset}; or reboot the machine)"
        if gpu.uncorrectable:
            detail = f"{gpu.uncorrectable} uncorrectable memory errors (ECC) since the driver was loaded"
            yield "WARN", what, f"{detail}; after more of them, drain this machine ({reset})"
        if gpu.remap_pending:
            yield "WARN", what, f"failed rows of its memory are replaced at the next reset: {reset}"


def _several(found: list[machine.Gpu]) -> Iterator[Finding]:
    """Yields how several GPUs can be used, and which of them the environment hides."""
    visible = visible_ids(os.environ)
    if visible is not None and found:
        shown = ", ".join(visible) or "none"
        level = "OK" if visible else "WARN"
        yield level, "gpus", f"{VISIBLE} shows {len(visible)} of {len(found)} to the server: {shown}"
    count = len(found) if visible is None else len(visible)
    if count > 1:
        detail = f"chorale serve --data-parallel-size {count} runs an engine on each, behind one port"
        if len({gpu.total_bytes for gpu in found}) > 1:
            detail += "; they differ in memory, and a request must fit the smallest"
        yield "OK", "replicas", detail


def check_links() -> Iterator[Finding]:
    count = len(machine.gpus())
    if count < 2:
        return
    sizes = [size for size in VALID_SIZES if 1 < size <= count]
    use = f"--tensor-parallel-size {' or '.join(map(str, sizes))} shares a model between them"
    peers = [kind for kind in links.peer_access() if kind != "OK"]
    if peers:
        kinds = ", ".join(peers)
        yield (
            "WARN",
            "peers",
            f"not all GPUs reach each other's memory ({kinds}): ranks exchange through NCCL, slower; engines "
            "(--data-parallel-size) are not affected",
        )
    found = links.links()
    if found and all(kind.startswith("NV") for kind in found):
        yield "OK", "links", f"{links.name_links(found)}; {use}"
    elif found:
        kinds = ", ".join(found)
        yield "WARN", "links", f"{kinds}, not NVLink between all: ranks exchange slowly; {use}"
    else:
        yield "WARN", "links", f"unknown (nvidia-smi topo -m prints none); {use}"


def check_cpu_kernels() -> Iterator[Finding]:
    """Yields whether the CPU kernels are used. Without them, serving on a CPU is several times slower."""
    found = library()
    if found.functions is not None:
        yield "OK", "CPU kernels", found.name
        return
    try:
        remedy = f"{compiler()[0]} is installed; run: python -m chorale.kernels.cpu.build"
    except BuildError:
        remedy = "install a C++ compiler, then run: python -m chorale.kernels.cpu.build"
    yield "WARN", "CPU kernels", f"not used, {found.why_not}; {remedy}"


def check_memory() -> Iterator[Finding]:
    total, available = total_memory(), available_memory()
    detail = f"{gib(available)} available of {gib(total)}, {cpu_count()} cores"
    yield ("WARN" if available < 4 * 2**30 else "OK"), "memory", detail


def check_disk() -> Iterator[Finding]:
    cache = machine.hub_cache()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{gib(free)} free for checkpoints at {cache}"
    if free < 15 * 2**30:
        yield (
            "WARN",
            "disk",
            f"{detail}; gpt-oss-20b needs 13 GiB, 120b 61 GiB (set HF_HOME to use another disk)",
        )
    else:
        yield "OK", "disk", detail
    if not os.access(existing, os.W_OK):
        yield "FIX", "disk", f"{existing} is not writable; set HF_HOME to a writable folder"


def check_vocabulary() -> Iterator[Finding]:
    from chorale.errors import ChoraleError, install_hint
    from chorale.harmony.vocab import load_vocabulary

    try:
        load_vocabulary()
    except (ChoraleError, OSError, ValueError) as error:
        yield ("FIX", "vocabulary", f"{error}; unset TIKTOKEN_ENCODINGS_BASE, or reinstall: {install_hint()}")
    else:
        source = os.environ.get("TIKTOKEN_ENCODINGS_BASE") or "inside the package"
        yield "OK", "vocabulary", f"o200k_base, sha256 checked ({source})"


def check_port() -> Iterator[Finding]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            yield "WARN", "port", f"{PORT} is in use; choose another with: chorale serve --port 9000"
        else:
            yield "OK", "port", f"{PORT} is free"


def check_packages() -> Iterator[Finding]:
    names = ("uvloop", "httptools", "llguidance", "safetensors", "huggingface_hub", "zmq", "tiktoken")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        yield "FIX", "packages", f"missing: {', '.join(missing)}: {install_hint()}"
    else:
        yield "OK", "packages", "all installed"
    location = Path(__file__).resolve().parents[3]
    yield "OK", "installed", str(location)


def check_sandbox() -> Iterator[Finding]:
    found, silent = [name for name in ("docker", "podman", "bwrap") if shutil.which(name)], ""
    if "docker" in found:
        try:
            asyncio.run(check_daemon("docker", "docker"))
        except SandboxMissing as missing:
            found.remove("docker")
            silent = f"; {missing}"
    try:
        interpreter.find()
        found.append("wasm")
    except interpreter.ModuleMissing:
        pass
    if found:
        yield "OK", "sandbox", f"python tool: {', '.join(found)} (to test: chorale tools check){silent}"
    else:
        yield "WARN", "sandbox", f"the python tool has no sandbox: {interpreter.REMEDY}{silent}"


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python, check_packages, check_torch, check_gpu, check_links, check_cpu_kernels, check_memory,
    check_disk, check_vocabulary, check_port, check_sandbox, check_ray,
)  # fmt: skip
