"""Reads the state of GPUs from ``nvidia-smi``. Torch-free; results are empty if it is missing or fails.

It lists all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says, so they are matched by UUID.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

SECONDS = 10.0  # a GPU that has failed can make the tool hang
_UNKNOWN = ("", "[N/A]", "N/A", "[Not Supported]", "[Unknown Error]")


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """Faults of one GPU's memory. None where GPU or driver do not count them."""

    index: int
    uuid: str
    uncorrectable: int | None  # ECC errors since the driver was loaded
    remap_pending: bool | None  # rows or pages of memory are replaced at the next reset
    remap_failed: bool | None  # there are no spare rows left
    action: str  # what the driver recommends: "Reset", "Reboot", ...; "" for nothing


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    num_bytes: int | None


def run(*arguments: str) -> str:
    """Returns the tool's output, or "" if it is missing, fails or hangs."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def query(option: str, *fields: str) -> list[list[str]]:
    """Returns a row for each object for which the tool has all ``fields``. ``option``: "gpu", "compute-apps",
    "remapped-rows"."""
    text = run(f"--query-{option}={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def health() -> list[GpuHealth]:
    """Returns the faults of each GPU's memory. Fields that a driver does not know are asked for separately,
    because it refuses a query with one of them."""
    counts = _by_uuid("gpu", "ecc.errors.uncorrected.volatile.total")
    pages = _by_uuid("gpu", "retired_pages.pending")
    rows = _by_uuid("remapped-rows", "remapped_rows.pending", "remapped_rows.failure", key="gpu_uuid")
    actions = _by_uuid("gpu", "gpu_recovery_action")
    found = []
    for index, uuid in query("gpu", "index", "uuid"):
        remap = rows.get(uuid) or [*pages.get(uuid, [""]), ""]
        action = actions.get(uuid, [""])[0]
        found.append(
            GpuHealth(
                int(index) if index.isdigit() else -1,
                uuid,
                _number(counts.get(uuid, [""])[0]),
                _is_set(remap[0]),
                _is_set(remap[1]),
                "" if action in (*_UNKNOWN, "None") else action,
            )
        )
    return found


def users(uuid: str) -> list[GpuUser]:
    """Returns the processes that hold memory of a GPU, the largest first. In a container the driver may list
    none of the other containers'."""
    rows = query("compute-apps", "gpu_uuid", "pid", "process_name", "used_memory")
    found = []
    for where, pid, name, used in rows:
        if where == uuid and pid.isdigit():
            mebibytes = _number(used)
            found.append(GpuUser(int(pid), name, None if mebibytes is None else mebibytes * 2**20))
    return sorted(found, key=lambda user: -(user.num_bytes or 0))


def capability(uuid: str) -> int:
    """Returns the compute capability of a GPU, 90 for 9.0; 0 if the driver does not know this field."""
    found = _by_uuid("gpu", "compute_cap").get(uuid, [""])[0]
    return _number(found.replace(".", "")) or 0


def _by_uuid(option: str, *fields: str, key: str = "uuid") -> dict[str, list[str]]:
    return {uuid: rest for uuid, *rest in query(option, key, *fields)}


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _is_set(text: str) -> bool | None:
    """Reads "Yes" and "No", or a count."""
    if text in _UNKNOWN:
        return None
    return text not in ("No", "0")
