"""Start-up errors give one line and exit code 2, before a process is started or anything is printed."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chorale.cli.main import main
from chorale.config.engine import EngineConfig, ServerConfig
from chorale.errors import ConfigError
from chorale.machine import hardware, platforms
from chorale.serve import precheck, supervisor

CASES = [
    ("--response-store {folder}", "--response-store"),
    ("--response-store {file}/store", "--response-store"),
    ("--response-store postgresql://127.0.0.1:1/none", "Connection refused"),
    ("--ssl-certfile /no/cert --ssl-keyfile /no/key", "/no/cert"),
    ("--ssl-certfile {file} --ssl-keyfile {file}", "--ssl-certfile"),
    ("/no/such/model", "no such folder"),
    ("{file}", "is a file, not a folder; name the checkpoint's folder"),
    ("{yaml}", "is a file, not a folder; for a configuration file use --config"),
    ("{folder}", "config.json: no such file"),
    ("--config {yaml}", "c.yaml, line 2, column 1: not valid YAML: while parsing a flow node, expected"),
    ("--config {control}", "control.yaml: not valid YAML: unacceptable character #x0001"),
    ("--config {bytes}", "bytes.yaml: not UTF-8 at byte 3; save it as UTF-8"),
    ("--uds absent/x.sock", "No such file or directory; create the folder absent, or choose another path"),
    ("--uds file/x.sock", "Not a directory; create the folder file, or choose another path"),
    (f"--uds {'x' * 120}", "path too long; choose a shorter one"),
    ("--uds {file}", "is not a socket; choose another path"),
    ("--device cuda", "--device cuda"),
    ("--ops triton", "needs a GPU"),
    ("--ops triton --device cpu", "the device is 'cpu'"),
    ("--device cpu --num-gpu-blocks-override 99999999", "KV blocks take"),
    ("--device cpu --kv-cache-memory-bytes 900GiB", "KV blocks take"),
    ("--device cpu --max-model-len 9000 --num-gpu-blocks-override 4", "--max-model-len 32 "),
    ("--max-model-len 99999999", "more than the model's maximum of 131072"),
    ("openai/gpt-oss-20b --max-model-len 99999999", "more than the model's maximum of 131072"),
    ("--system-start-date yesterday", "--system-start-date"),
    ("--host 192.0.2.1", "cannot listen"),
]


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("neither a certificate nor a folder")
    (tmp_path / "c.yaml").write_text("port: [\n")
    (tmp_path / "control.yaml").write_text("a: \x01")
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff")
    names = {"yaml": "c.yaml", "control": "control.yaml", "bytes": "bytes.yaml"}
    return {name: str(tmp_path / names.get(name, name)) for name in ("folder", "file", *names)}


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with the error "started" where it would start processes."""

    def started(*_: object, **__: object) -> None:
        raise ConfigError("started")

    monkeypatch.setattr(supervisor, "Supervisor", started)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("line", "said"), CASES)
def test_a_start_error_is_one_line(
    line: str,
    said: str,
    paths: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(Path(paths["folder"]).parent)
    monkeypatch.setattr(platforms, "why_no_cuda", lambda: "the NVIDIA driver finds no GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["serve", *line.format(**paths).split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith("chorale: error: ")
    assert said.format(**paths) in shown.err
    assert "<unicode string>" not in shown.err


def test_a_start_error_needs_little_cpu_time() -> None:
    """Measures CPU time, since the machine may be busy. Importing torch would take three seconds."""
    command = [sys.executable, "-X", "importtime", "-m", "chorale", "serve", "/no/such/model"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert "| torch" not in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_a_store_on_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts, and stores nothing."""

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(precheck, "_check_file", full)
    precheck.check_store(str(tmp_path / "store"))


@pytest.mark.parametrize("found", [1, 1000])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_store_of_another_format_is_refused(
    found: int, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "chorale" / "responses.sqlite3"
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE schema_version (version INTEGER NOT NULL)")
        file.execute("INSERT INTO schema_version VALUES (?)", (found,))
        file.commit()
    with pytest.raises(ConfigError, match=f"responses.sqlite3 has format {found}"):
        precheck.check_store(str(path) if is_named else None)


@pytest.mark.parametrize(
    ("build", "reason"), [("2.11.0+cpu", "a build for CPUs"), ("2.11.0", "no NVIDIA driver")]
)
def test_why_no_cuda_names_the_reason(build: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: build)
    monkeypatch.setattr(hardware, "_cuda_driver", lambda: None)
    assert reason in (hardware.why_no_cuda() or "")


def test_a_rocm_build_of_torch_may_find_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.11.0+rocm6.4")
    assert hardware.why_no_cuda() is None


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("gpus", "line", "said"),
    [(2, "", "--tensor-parallel-size 8 needs 8 GPUs, and 2 are visible here"),
     (1, "", "use --tensor-parallel-size 1 (on the command line, which overrides a recipe)"),
     (2, "--tensor-parallel-size 2", "started"), (8, "", "started")],
)  # fmt: skip
def test_a_recipe_for_more_gpus_gets_a_remedy(
    gpus: int,
    line: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: openai/gpt-oss-120b\ntensor-parallel-size: 8\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(platforms, "why_no_cuda", lambda: None)
    monkeypatch.setattr(platforms, "gpu_count", lambda: gpus)
    assert main(["serve", "--config", str(recipe), "--port", "0", *line.split()]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1


class Driver:
    """A stand-in for NVIDIA's driver that finds ``gpus`` GPUs."""

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus

    def cuInit(self, _: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._gpus
        return 0


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("gpus", [1, 3, 5, 7])
def test_too_few_gpus_for_several_engines_get_a_remedy_that_works(
    gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "_cuda_driver", lambda: Driver(gpus))
    version = hardware.importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "2.11.0+cu130" if name == "torch" else version(name)
    )
    command = ["serve", "openai/gpt-oss-120b", "--port", "0"]
    assert main([*command, "-tp", "4", "-dp", "2"]) == 2
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1
    assert f"2 engines of 4 GPUs (--tensor-parallel-size) need 8 GPUs, and {gpus} are visible" in shown
    remedy = re.search(r"use ((?:--\S+ \d+ ?)+)", shown)
    assert remedy is not None
    words = remedy[1].split()
    kept = [] if "--tensor-parallel-size" in words else ["-tp", "4"]
    assert main([*command, *kept, *words]) == 2
    assert "started" in capsys.readouterr().err  # the remedy is sufficient


@pytest.mark.parametrize("options", [{}, {"response_store": ":memory:"}])
def test_an_unusable_batch_storage_ends_the_start(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "taken"
    if not options:
        taken.write_text("")
        options = {"response_store": str(tmp_path / "store")}
    with pytest.raises(ConfigError, match="--batch-storage"):
        precheck.check_start(EngineConfig(device="cpu"), ServerConfig(batch_storage=str(taken), **options))


def test_a_port_in_use_comes_with_the_command_of_make(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``make serve`` sets the variable: its users cannot add an option to the command."""
    monkeypatch.setenv("CHORALE_PORT_HINT", 'make serve ARGS="--port 9000"')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert 'make serve ARGS="--port 9000"' in capsys.readouterr().err
