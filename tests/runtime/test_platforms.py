"""Which accelerator ``--device`` means, what is missing, and which variable chooses among several."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from chorale.cli.commands.machine import doctor
from chorale.cli.main import main
from chorale.config.engine import EngineConfig, ServerConfig
from chorale.errors import ConfigError
from chorale.machine import platforms
from chorale.machine.devices import replica_environments
from chorale.machine.hardware import Hardware, Kind
from chorale.machine.platforms import CUDA, NPU, ROCM, find_platform
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.sizing.resolve import resolve
from chorale.serve.precheck import check_device


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without any accelerator; tests add to it."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cpu")
    monkeypatch.setattr(platforms, "_DEV", tmp_path)
    monkeypatch.setattr(platforms, "_KFD_NODES", tmp_path / "nodes")
    monkeypatch.setattr(platforms, "_is_installed", lambda _: False)
    for name in (*ROCM.variables, *NPU.variables):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def add_amd(tmp_path: Path, gpus: int) -> None:
    (tmp_path / "kfd").touch()
    for number, simds in enumerate([0, *[1216] * gpus]):  # the first is the CPU
        node = tmp_path / "nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simds}\n")


def test_without_any(build: pytest.MonkeyPatch) -> None:
    assert find_platform("auto") is find_platform("cpu") is None
    assert (find_platform("cuda"), find_platform("rocm"), find_platform("npu")) == (CUDA, ROCM, NPU)


def test_a_build_for_rocm(build: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "not a build for ROCm; install one" in (ROCM.why_absent() or "")
    build.setattr("importlib.metadata.version", lambda _: "2.13.0+rocm6.4")
    assert find_platform("cuda") is ROCM
    assert find_platform("auto") is None
    assert "/dev/kfd is missing" in (ROCM.why_absent() or "")
    add_amd(tmp_path, 0)
    assert ROCM.why_absent() == "the AMD driver finds no GPU"


@pytest.mark.parametrize(
    ("hip", "is_rocm"),
    [("hip: Optional[str] = '7.0.51831'", True), ('hip = "6.4"', True), ("hip: Optional[str] = None", False)],
)
def test_a_build_from_source(hip: str, is_rocm: bool, build: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of ROCm's own images, whose version is only that of a commit."""
    build.setattr("importlib.metadata.version", lambda _: "2.9.0a0+git1c57644")
    (tmp_path / "version.py").write_text(f"__version__ = '2.9.0a0'\ncuda: Optional[str] = None\n{hip}\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    build.setattr("importlib.util.find_spec", lambda _: spec)
    assert (find_platform("cuda") is ROCM) is is_rocm


def test_gpus_of_amd_are_shared_out(build: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build.setattr("importlib.metadata.version", lambda _: "2.13.0+rocm6.4")
    add_amd(tmp_path, 4)
    assert find_platform("auto") is ROCM
    build.setattr("chorale.machine.facts.gpus", list)
    [(level, _, detail)] = doctor.check_gpu()
    assert level == "WARN"
    assert detail.startswith("--device rocm, 4 found. Chorale has never run on an AMD GPU")
    config, hip, cuda = EngineConfig(device="rocm"), *ROCM.variables
    assert replica_environments(config, 2, {}) == [{hip: "0"}, {hip: "1"}]
    assert replica_environments(config, 2, {cuda: "3,2"}) == [{cuda: "3"}, {cuda: "2"}]
    assert replica_environments(config, 2, {hip: "1,3", cuda: "0"}) == [{hip: "1"}, {hip: "3"}]
    with pytest.raises(ConfigError, match=r"5 GPUs, and 4 are visible .*or list more in HIP_VISIBLE_DEVICES"):
        replica_environments(config, 5, {})


def test_npus_are_shared_out(build: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "pip install torch-npu" in (NPU.why_absent() or "")
    build.setattr(platforms, "_is_installed", lambda _: True)
    assert "/dev/davinci0 is missing" in (NPU.why_absent() or "")
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    assert find_platform("auto") is NPU
    config, name = EngineConfig(device="npu"), "ASCEND_RT_VISIBLE_DEVICES"
    assert replica_environments(config, 2, {}) == [{name: "0"}, {name: "1"}]
    pairs = EngineConfig(device="npu", tensor_parallel_size=2)
    assert replica_environments(pairs, 2, {name: "4,5,6,7"}) == [{name: "4,5"}, {name: "6,7"}]
    build.setenv(name, "1")
    with pytest.raises(
        ConfigError, match=r"needs 2 GPUs, and 1 is visible here .after ASCEND_RT_VISIBLE_DEVICES"
    ):
        check_device(pairs)
    with pytest.raises(ConfigError, match=r"--ops triton needs a GPU .*the device is 'npu'"):
        check_device(EngineConfig(device="npu", ops="triton"))


@pytest.mark.parametrize(
    ("device", "words"),
    [("rocm", "this PyTorch is not a build for ROCm; install one"), ("npu", "torch_npu is not installed")],
)
def test_a_device_that_is_not_there_is_one_line(
    device: str, words: str, build: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "demo", "--device", device]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"chorale: error: --device {device}: ")
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(("device", "example"), [("rocm", "mi300x"), ("npu", "ascend-910b")])
def test_fit_asks_for_a_name(device: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "gpt-oss-20b", "--device", device]) == 2
    assert f"--gpu {example}" in capsys.readouterr().err
    assert main(["fit", "gpt-oss-20b", "--device", device, "--gpu", "h100"]) == 2
    assert "it is for --device cuda" in capsys.readouterr().err
    assert main(["fit", "gpt-oss-20b", "--device", device, "--gpu", example]) == 0


def test_replicas_without_the_named_device_are_refused(build: pytest.MonkeyPatch) -> None:
    from chorale.serve.precheck import check_start

    with pytest.raises(ConfigError, match="not a build for ROCm"):
        check_start(EngineConfig(device="rocm"), ServerConfig(data_parallel_size=2))


@pytest.mark.parametrize(("kind", "states"), [("cuda", ()), ("rocm", (ROCM.state,)), ("npu", (NPU.state,))])
def test_the_banner_says_what_has_never_run(kind: Kind, states: tuple[str, ...]) -> None:
    """Notes are the banner's warnings, and are in ``LLM``'s log and in ``chorale fit``."""
    found = resolve(EngineConfig(), make_config(**SHAPES["20b"]), Hardware(kind, "a device", 2**37, 2**37))
    assert found.notes == states
    assert all("has never run on an" in state for state in states)
