"""``chorale doctor`` with scripts in place of ``nvidia-smi`` and ``docker``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chorale.cli.commands.machine import doctor, fit
from chorale.machine import facts, links, nvidia_smi

# Answers each query; like nvidia-smi, it refuses a query with an unknown field.
SCRIPT = """#!/bin/sh
case "$1" in
  --query-gpu=name,memory.total,memory.free,driver_version,uuid)
    echo "NVIDIA H200, 143771, 20000, 570.86, GPU-a"
    echo "NVIDIA H200, 143771, 143000, 570.86, GPU-b" ;;
  --query-gpu=uuid,compute_cap) echo "GPU-a, 8.9"; echo "GPU-b, 9.0" ;;
  --query-gpu=index,uuid) echo "0, GPU-a"; echo "1, GPU-b" ;;
  --query-gpu=uuid,ecc.errors.uncorrected.volatile.total) echo "GPU-a, 0"; echo "GPU-b, {ecc}" ;;
  --query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure)
    echo "GPU-a, 0, 0"; echo "GPU-b, {pending}, {failed}" ;;
  --query-gpu=uuid,gpu_recovery_action) {actions} ;;
  --query-compute-apps=*) echo "GPU-a, 4711, /usr/bin/python3, 121000"; echo "GPU-b, 12, b, 5" ;;
  topo) if [ "$2" = -p2p ]; then cat "$0.p2p"; else cat "$0.topo"; fi ;;
  *) echo "Field is not a valid field to query." >&2; exit 2 ;;
esac
"""
TOPO = "\tGPU0\tGPU1\nGPU0\t X \t{link}\nGPU1\t{link}\t X \n\nLegend:\n  X = Self\n"


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **given: str) -> None:
    state = {"ecc": "0", "pending": "0", "failed": "0", "actions": "exit 2", "link": "NV18", "access": "OK"}
    state |= given
    tool = folder / "nvidia-smi"
    tool.write_text(SCRIPT.format(**state))
    tool.chmod(0o755)
    (folder / "nvidia-smi.topo").write_text(TOPO.format(link=state["link"]))
    (folder / "nvidia-smi.p2p").write_text(TOPO.format(link=state["access"]))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


Diagnose = Callable[..., tuple[int, list[str]]]  # the state of the GPUs -> exit code, lines about them


@pytest.fixture
def diagnose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Diagnose:
    def run(**state: str) -> tuple[int, list[str]]:
        install(tmp_path, monkeypatch, **state)
        code, shown = doctor.run([]), capsys.readouterr().out.splitlines()
        return code, [line for line in shown if any(word in line for word in (" gpu ", "links", "peers"))]

    return run


def test_healthy_gpus_are_listed_with_memory_and_links(diagnose: Diagnose) -> None:
    _, lines = diagnose()
    assert lines[0].startswith("WARN  gpu 0        NVIDIA H200, 19.53 GiB free of 140.40 GiB")
    assert lines[1] == "WARN  gpu 0        its memory is used by process 4711 (/usr/bin/python3, 118.16 GiB)"
    assert lines[2].startswith("OK    gpu 1        NVIDIA H200, 139.65 GiB free")
    assert lines[3].startswith("OK    links        NVLink (NV18)")
    assert links.links(["GPU-b", "GPU-a"]) == ["NV18"]
    assert links.links(["GPU-b", "GPU-c"]) == []  # nvidia-smi does not list GPU-c
    assert len(lines) == 4


def test_memory_errors_give_warnings(diagnose: Diagnose) -> None:
    _, lines = diagnose(ecc="2", pending="1")
    (counted,) = [line for line in lines if "uncorrectable" in line]
    assert counted.startswith("WARN  gpu 1        2 uncorrectable memory errors (ECC)")
    (pending,) = [line for line in lines if "next reset" in line]
    assert pending.startswith("WARN  gpu 1 ")
    assert "nvidia-smi --gpu-reset -i 1" in pending


def test_a_gpu_that_needs_a_reset_or_replacement_is_marked_fix(diagnose: Diagnose) -> None:
    code, lines = diagnose(failed="1", actions='echo "GPU-a, None"; echo "GPU-b, Drain and Reset"')
    assert code == 1
    assert [line for line in lines if line.startswith("FIX   gpu 1 ")] == [
        "FIX   gpu 1        its memory has failed rows and no spare ones left: have the GPU replaced",
        "FIX   gpu 1        the driver recommends: Drain and Reset (nvidia-smi --gpu-reset -i 1, with "
        "nothing running on it; or reboot the machine)",
    ]
    assert not [line for line in lines if "gpu 0" in line and line.startswith("FIX")]


def test_missing_ecc_counters_are_not_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, ecc="[N/A]", pending="[N/A]", failed="[N/A]")
    assert [(gpu.uncorrectable, gpu.remap_pending, gpu.remap_failed) for gpu in nvidia_smi.health()] == [
        (0, False, False), (None, None, None)
    ]  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert nvidia_smi.health() == []
    assert nvidia_smi.users("GPU-a") == []
    assert links.links() == links.links(["GPU-a", "GPU-b"]) == []


def test_gpus_without_peer_access_give_a_warning(diagnose: Diagnose) -> None:
    _, lines = diagnose(link="SYS", access="CNS")
    assert lines[-2].startswith("WARN  peers        not all GPUs reach each other's memory (CNS): ranks ")
    assert "through NCCL, slower" in lines[-2]
    assert lines[-1].startswith("WARN  links        SYS, not NVLink")


@pytest.mark.parametrize("answers", [True, False])
def test_docker_is_listed_only_if_its_daemon_responds(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\n" + ("echo ID\n" if answers else "echo no daemon here; exit 1\n"))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    [(_, what, detail)] = doctor.check_sandbox()
    assert what == "sandbox"
    assert ("docker" in detail.partition(" (")[0].removeprefix("python tool: ").split(", ")) == answers
    assert ("the docker daemon does not respond (no daemon here)" in detail) == (not answers)


def test_the_compute_capability_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    assert [nvidia_smi.capability(uuid) for uuid in ("GPU-a", "GPU-b", "GPU-c")] == [89, 90, 0]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert nvidia_smi.capability("GPU-b") == 0


def test_fit_counts_the_copies_of_weights_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second GPU of the script has the memory, and kernels that read them."""
    install(tmp_path, monkeypatch)
    second = facts.gpus()[1:]
    monkeypatch.setattr(facts, "gpus", lambda: second)
    assert fit.run(["gpt-oss-20b"]) == 0
    assert "compact_weights = True" in capsys.readouterr().out
