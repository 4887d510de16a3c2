"""The table of flags: bounds of numbers, and the graph settings of --compilation-config."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from chorale.config.engine import EngineConfig, ServerConfig, ToolConfig
from chorale.config.options.flags import FLAGS
from chorale.config.options.settings import merge
from chorale.config.options.values import MOST, NUMBERS, Flag
from chorale.errors import ConfigError
from chorale.llm.configure import engine_config
from tests.api.field_reads import is_read

NUMERIC = [flag for flag in FLAGS.values() if flag.kind in NUMBERS and flag.target is not None]


@pytest.mark.parametrize("flag", NUMERIC, ids=lambda flag: flag.name)
def test_every_number_has_bounds_that_hold(flag: Flag) -> None:
    assert flag.least is not None, f"{flag.name}: add least="
    below = flag.least if flag.above else flag.least - 1
    # A size of -1 is "decide for me", and no other size can be written below 0.
    if not (flag.kind == "size" and below < 0):
        text = f"{below:.0f}" if flag.kind != "float" else f"{below}"
        with pytest.raises(ConfigError, match=f"--{flag.name}.* must be "):
            merge([f"--{flag.name}", text], {})
    with pytest.raises(ConfigError, match=f"--{flag.name}.*(too large|must be )"):
        merge([f"--{flag.name}", f"{int(flag.most) + 1}"], {})
    if flag.kind == "float":
        with pytest.raises(ConfigError, match=f"--{flag.name}"):
            merge([f"--{flag.name}", "nan"], {})


@pytest.mark.parametrize("flag", [each for each in NUMERIC if str(each.target).startswith("engine.")])
def test_llm_has_the_same_bounds(flag: Flag) -> None:
    name = str(flag.target).partition(".")[2]
    for beyond in (flag.least, flag.most):
        if beyond is None or abs(beyond) == MOST:
            continue
        outside = beyond - 1 if beyond is flag.least else beyond + 1
        with pytest.raises(ConfigError, match=f"--{flag.name} "):
            engine_config("demo", {name: outside}, 1)


CONFIGS = (EngineConfig, ServerConfig, ToolConfig)
CHECKS = ("config/",)  # this package only merges and checks the flags


def unread(config: type) -> list[str]:
    names = [field.name for field in dataclasses.fields(config)]
    return [name for name in names if not is_read(config, name, except_in=CHECKS)]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_field_of_each_flag_is_read_somewhere(config: type) -> None:
    assert unread(config) == []


# --------------------------------------------------------------------------- graphs


def graphs(line: str) -> tuple[bool, bool]:
    """Returns (whether decode steps are captured, whether mixed steps are captured)."""
    engine = merge(shlex.split(line), {}).engine
    return not engine.enforce_eager, not engine.enforce_eager and engine.mixed_cuda_graphs


@pytest.mark.parametrize(
    ("line", "expected", "num_notices"),
    [
        ("", (True, True), 0),
        ("-cc.cudagraph_mode=none", (False, False), 0),
        ("-cc.cudagraph_mode 0", (False, False), 0),
        ('--compilation-config \'{"cudagraph_mode": "NONE"}\'', (False, False), 0),
        ("-O.cudagraph_mode=FULL_DECODE_ONLY", (True, False), 0),
        ("--compilation-config.cudagraph_mode FULL_AND_PIECEWISE", (True, True), 0),
        ("-cc.cudagraph_mode FULL", (True, True), 1),
        ("-cc.cudagraph_mode 1", (True, True), 1),
        ("-O0", (False, False), 1),
        ("-O0 -cc.cudagraph_mode FULL_DECODE_ONLY", (True, False), 1),
        ("-O0 --no-enforce-eager", (True, True), 1),
        ("-O2 --enforce-eager", (False, False), 1),
        ("--enforce-eager -cc.cudagraph_mode NONE", (False, False), 0),
        ("--compilation-config 3", (True, True), 1),
        ("-cc.mode 3 -cc.cudagraph_mode NONE", (False, False), 1),
    ],
)
def test_cudagraph_modes_are_read(line: str, expected: tuple[bool, bool], num_notices: int) -> None:
    assert graphs(line) == expected
    assert len(merge(shlex.split(line), {}).notices) == num_notices


def test_cudagraph_sizes_are_read() -> None:
    line = '--compilation-config \'{"cudagraph_capture_sizes": [1, 2, 4], "max_cudagraph_capture_size": 4}\''
    engine = merge(shlex.split(line), {}).engine
    assert (engine.cudagraph_capture_sizes, engine.max_cudagraph_capture_size) == ((1, 2, 4), 4)
    engine = merge(["-cc.cudagraph_capture_sizes", "[8, 16]"], {}).engine
    assert engine.cudagraph_capture_sizes == (8, 16)
    engine = merge(["-cc.cudagraph_capture_sizes+", "8", "-cc.cudagraph_capture_sizes+=16"], {}).engine
    assert engine.cudagraph_capture_sizes == (8, 16)


@pytest.mark.parametrize(
    "line",
    [
        "-cc.cudagraph_capture_sizes [1] --cudagraph-capture-sizes 2",
        "-cc.max_cudagraph_capture_size 1 --max-cudagraph-capture-size 2",
        "-cc.cudagraph_mode FULL --enforce-eager",
        "-cc.cudagraph_mode NONE --no-enforce-eager",
    ],
)
def test_contradicting_options_are_an_error(line: str) -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        merge(shlex.split(line), {})


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("compilation-config: {cudagraph_mode: FULL, cudagraph_capture_sizes: [1, 2]}\n")
    engine = merge(["--config", str(path), "--enforce-eager", "--cudagraph-capture-sizes", "4"], {}).engine
    assert (engine.enforce_eager, engine.cudagraph_capture_sizes) == (True, (4,))
    path.write_text("enforce-eager: true\ncudagraph-capture-sizes: [1, 2]\n")
    line = [
        "--config",
        str(path),
        "-cc.cudagraph_mode",
        "FULL_DECODE_ONLY",
        "-cc.cudagraph_capture_sizes=[8]",
    ]
    engine = merge(line, {}).engine
    assert (engine.enforce_eager, engine.mixed_cuda_graphs) == (False, False)
    assert engine.cudagraph_capture_sizes == (8,)


# --------------------------------------------------------------------------- several devices, other vendors


@pytest.mark.parametrize(
    "name",
    ["pipeline-parallel-size", "decode-context-parallel-size"],
)
def test_other_ways_to_use_several_devices_give_the_same_error(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merge([f"--{name}", "2"], {})
    same = caught.value.message.removeprefix(f"--{name} 2 (command line) is not supported: ")
    assert same.startswith("neither layers nor the context of a request are divided")
    assert "--tensor-parallel-size" in same
    assert "--data-parallel-size" in same
    assert merge([f"--{name}", "1"], {}).notices == ()


def test_devices_of_other_vendors_give_their_state_of_support() -> None:
    for given, words in (("hip", "--device rocm"), ("ascend", "--device npu"), ("mps", "Apple GPUs")):
        with pytest.raises(
            ConfigError, match=f"--device: '{given}' is not one of auto, cpu, cuda, rocm, npu: .*{words}"
        ):
            merge(["--device", given], {})


def test_variables_of_other_vendors_give_a_notice() -> None:
    environment = {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "", "HCCL_BUFFSIZE": "1024",
                   "ASCEND_RT_VISIBLE_DEVICES": "0", "VLLM_ROCM_USE_AITER": "1",
                   "VLLM_ASCEND_ENABLE_NZ": "1"}  # fmt: skip
    notices = merge([], environment).notices
    assert [notice.split(" is not read by Chorale: ")[0] for notice in notices] == [
        "VLLM_ASCEND_ENABLE_NZ", "VLLM_ROCM_USE_AITER",
    ]  # fmt: skip
    assert "--device npu" in notices[0]
    assert "AMD GPUs" in notices[1]
