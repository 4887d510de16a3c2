"""The output of ``chorale serve`` without a terminal: start-up phases and banner."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from chorale.cli.commands.serve.banner import Screen
from chorale.client.base import EngineInfo, EngineStatus
from chorale.config.options.settings import merge

INFO = EngineInfo(
    model="openai/gpt-oss-20b", max_model_len=131072, max_num_seqs=64, num_kv_tokens=262144,
    kv_cache_dtype="fp8_e4m3", parameters=20_900_000_000, device="CPU, 2 threads", dtype="bfloat16",
)  # fmt: skip


def shown(
    arguments: list[str],
    *statuses: tuple[EngineStatus, EngineInfo | None],
    stop: bool = False,
    sockets: Sequence[socket.socket] = (),
) -> list[str]:
    output = io.StringIO()
    screen = Screen(merge(arguments, {"CHORALE_API_KEY": "sk-canary"}), output)
    screen.on_listening(list(sockets))
    for status, info in statuses:
        screen.on_status(status, info)
    if stop:
        screen.on_stopping()
    return output.getvalue().splitlines()


def test_phases_then_a_banner_of_at_most_a_dozen_lines() -> None:
    lines = shown(
        ["openai/gpt-oss-20b", "--port", "9000"],
        (EngineStatus("loading", "load", 0.5, "6.9 GB"), None),
        (EngineStatus("loading", "kv_pool"), None),
        (EngineStatus("ready"), INFO),
    )
    text = "\n".join(lines)
    assert any(line.startswith("load weights: ") and "6.9 GB" in line for line in lines)
    assert (
        "KV cache  262,144 tokens in fp8_e4m3, enough for 2.0 requests of the maximum 131,072 tokens" in lines
    )
    assert "http://localhost:9000/v1" in text
    assert "docs http://localhost:9000/docs" in text
    assert "auth      1 API key" in lines
    assert len(lines) - lines.index("") <= 12
    assert lines[-1] == "Application startup complete."
    assert "sk-canary" not in text
    assert "warning" not in text  # nothing is degraded


def test_a_terminal_shows_the_seconds_of_the_current_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # the console then takes its output for a terminal
    text = "\n".join(shown(["x"], (EngineStatus("loading", "load", 0.5, "6.9 GB"), None), stop=True))
    (seconds,) = set(re.findall(r"load weights *([\d.]+) s *50% *6.9 GB", text)[:1])
    assert float(seconds) < 60


def test_the_banner_shows_ranks_and_their_memory() -> None:
    sizes = {"weights": (3 * 2**30, 2**30), "kv_cache": (2**29, 2**29)}
    note = "ranks exchange through NCCL, which is slower"
    info = replace(INFO, tensor_parallel_size=2, rank_bytes=sizes, exchange="nccl", notes=(note,))
    lines = shown([], (EngineStatus("ready"), info))
    assert "exchange  ranks sum their partial results through NCCL" in lines  # links are unknown
    info = replace(info, rank_links="PCIe (SYS)")
    linked = shown([], (EngineStatus("ready"), info))
    assert "exchange  ranks sum their partial results through NCCL; links: PCIe (SYS)" in linked
    assert f"warning   {note}" in lines
    assert "device    2 ranks, each: CPU, 2 threads; kernels: PyTorch" in lines
    assert "memory    at most 3.00 GiB of weights, 0.50 GiB of kv cache in each rank" in lines


def test_speculation_is_shown() -> None:
    lines = shown(["x"], (EngineStatus("ready"), replace(INFO, speculation="ngram, up to 4 draft tokens")))
    assert "drafts    ngram, up to 4 draft tokens" in lines
    assert not any(line.startswith("drafts") for line in shown(["x"], (EngineStatus("ready"), INFO)))


def test_docs_that_are_off_are_not_shown() -> None:
    lines = shown(["--disable-fastapi-docs"], (EngineStatus("ready"), INFO))
    assert not any("/docs" in line for line in lines)


def test_the_shown_address_is_usable() -> None:
    """An IPv6 address has brackets, and the port is the bound one."""
    assert "http://[::1]:9000/v1" in "\n".join(
        shown(["--host", "::1", "--port", "9000"], (EngineStatus("ready"), INFO))
    )
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        lines = shown(["--port", "0"], (EngineStatus("ready"), INFO), sockets=[bound])
        assert f"http://localhost:{bound.getsockname()[1]}/v1" in "\n".join(lines)
    assert not any("localhost:0" in line for line in lines)


def test_degraded_settings_give_one_warning_line() -> None:
    info = replace(INFO, notes=("fp8 became bfloat16", "shorter context"))
    lines = shown(["x"], (EngineStatus("ready"), info))
    assert [line for line in lines if line.startswith("warning")] == [
        "warning   fp8 became bfloat16; shorter context"
    ]


def test_a_failure_is_printed_once_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(["x"], (EngineStatus("failed", message="model 'x': no such folder"), None), stop=True)
    assert lines[-1].startswith("listening at")
    assert capsys.readouterr().err == "chorale: error: model 'x': no such folder\n"


def test_a_restart_of_the_engine_is_shown() -> None:
    lines = shown(
        ["x"],
        (EngineStatus("ready"), INFO),
        (EngineStatus("dead", message="killed"), None),
        (EngineStatus("ready"), INFO),
    )
    assert lines[-2:] == ["the engine died and is restarting: killed", "the engine is ready again"]


def test_replicas_have_one_banner_and_name_the_engine_that_died() -> None:
    lines = shown(
        ["-dp", "2", "--api-server-count", "3"],
        (EngineStatus("ready"), INFO),
        (EngineStatus("dead", message="engine 1: the engine process was killed; restarting in 0.1 s"), None),
        (EngineStatus("ready"), INFO),
    )
    assert "device    CPU, 2 threads; kernels: PyTorch (each of 2 engines)" in lines
    assert any("2.0 requests per engine of" in line for line in lines)
    (engines,) = [line for line in lines if line.startswith("engines   ")]
    assert engines.startswith("engines   2 behind one port, 3 HTTP processes")
    assert lines[-2:] == [
        "engine 1: the engine process was killed; restarting in 0.1 s",
        "every engine is ready again",
    ]
