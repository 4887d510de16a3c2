"""``chorale eval parity`` with real servers: planted faults are found and harmless changes are judged equal.

A faulty server has an ordinary checkpoint folder with one fault (``tests/support/device/faults.py``). The
slow tests take half a minute each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chorale_evals.commands import parity as eval_parity
from chorale_evals.commands.progress import Line
from chorale_evals.parity.differences import compare
from chorale_evals.parity.measure import Plan, plan_of
from chorale_evals.parity.recording import Recording, save
from chorale_evals.parity.texts import Text
from chorale_evals.parity.verdict import judge
from readings import recording

from chorale.cli.main import main
from chorale.model.demo import ensure_demo
from chorale.requests.openai_client import Endpoint
from tests.support.device.faults import (
    FAULTS,
    Fault,
    bias_dropped,
    columns_swapped,
    environment_of,
    expert_scale,
    plant,
    setting,
    sink_left_out,
)
from tests.support.grammar.structured import make_client
from tests.support.runtime import VOCAB, write_checkpoint
from tests.support.server import in_thread

OPS = "--ops reference"  # the other CPU ops compute in float32, whatever the dtype
SIZES = ["--lengths", "200", "--texts", "5", "--tokens", "8", "--top-k", "2"]

# Faults in other layers, experts and constants than those in FAULTS.
MORE: dict[str, Fault] = {
    "expert_scale_half": expert_scale(4, 6, -1),
    "sink_left_out_of_the_last_layer": sink_left_out(5),
    "heads_swapped": columns_swapped(4, 7, 8, 3),
    "no_output_bias": bias_dropped(2, "self_attn.o_proj.bias"),
    "no_router_bias": bias_dropped(4, "mlp.router.bias"),
    "three_experts": setting(num_experts_per_tok=3, experts_per_token=3),
    "rope_theta": setting(rope_theta=149000),
    "rope_truncated": setting(rope_scaling={"truncate": True}),
    "swiglu_alpha": setting(swiglu_alpha=1.7),
    "swiglu_limit": setting(swiglu_limit=8.0),
    "rms_norm_eps": setting(rms_norm_eps=1e-6),
}
HARMLESS = {
    "fewer_sequences": ["--max-num-seqs", "2"],
    "shorter_chunks": ["--max-num-batched-tokens", "64"],
    "no_prefix_caching": ["--no-enable-prefix-caching"],
    "speculation": ["--spec-method", "ngram", "--spec-tokens", "4"],
    "two_threads": ["--num-threads", "2"],
    "two_ranks": ["-tp", "2"],
    "smaller_pages": ["--block-size", "32"],
}


def parity(a: Path, source: str, *options: str, out: Path) -> tuple[int, dict[str, Any]]:
    code = chorale(str(a), f"{source} {OPS}", "--out", str(out), *options)
    return code, json.loads((out / "result.json").read_text())


def chorale(*arguments: str) -> int:
    """Runs ``chorale eval parity`` in a subprocess. Returns its exit code."""
    command = [sys.executable, "-m", "chorale", "eval", "parity", *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def record(source: str, folder: Path, *options: str) -> Path:
    path = folder / "base.npz"
    assert chorale("record", source, "-o", str(path), *options) == 0
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(f"demo {OPS}", tmp_path_factory.mktemp("base"), *SIZES)


@contextlib.contextmanager
def planted(name: str, fault: Fault, folder: Path) -> Iterator[str]:
    """Yields the arguments of a server with the fault."""
    if fault.engine:
        with environment_of(name):
            yield "demo"
    else:
        yield str(plant(fault, ensure_demo(), folder / name))


def test_a_window_that_is_one_token_short_is_found_on_a_small_checkpoint(tmp_path: Path) -> None:
    """A fast variant of the planted faults: a random model with a small vocabulary and a window of 32."""
    good = write_checkpoint(tmp_path / "good")
    bad = plant("window_one_less", good, tmp_path / "bad")
    rng = np.random.default_rng(3)
    texts = tuple(Text(f"t{n}", "prose", 200, tuple(rng.integers(0, VOCAB, 200).tolist())) for n in range(6))
    a = _measured(good, Plan(texts, None, 8, 2))
    pairs = compare(a, _measured(bad, plan_of(a)))
    assert all(np.nanmax(np.abs(pair.delta[:32])) == 0.0 for pair in pairs)
    found = judge(pairs)
    assert (found.verdict, found.onset) == ("different", 32), found.reasons
    itself = judge(compare(a, a))
    assert itself.verdict == "equal", itself.reasons
    assert 'dtype="float32",kv_cache_dtype="float32",ops=' in a.about["formats"]


def _measured(folder: Path, plan: Plan) -> Recording:
    """Measures the whole app with the real engine in this process, which is faster than ``chorale serve``."""
    client: Any = make_client(folder, max_model_len=1024, num_gpu_blocks_override=256)
    with in_thread(client, names=("demo",)) as server:
        endpoint = Endpoint(server.url)
        found = asyncio.run(eval_parity.measured(endpoint, "here", None, plan, lambda _: None))
    asyncio.run(client.close())
    return found


def test_two_recordings_are_compared_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    save(recording("before", 1, 3e-6), a)
    save(recording("after", 2, 2e-2), b)
    assert main(["eval", "parity", str(a), str(a)]) == 0
    assert "Verdict: equal up to rounding (as expected)" in capsys.readouterr().out
    assert main(["eval", "parity", str(a), str(b)]) == 1
    assert "Verdict: different precision (expected: equal up to rounding)" in capsys.readouterr().out
    assert main(["eval", "parity", str(a), str(b), "--expect", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "precision"


def test_the_texts_of_the_demo_are_shorter() -> None:
    def longest(source: str) -> int:
        given = eval_parity.record_parser().read([source, "-o", "file", "--texts", "1"])
        return max(text.length for text in eval_parity._plan(given).texts)

    sources = ("demo", "demo --max-num-seqs 2", "http://demo/v1", "gpt-oss-20b")
    assert [longest(source) for source in sources] == [1024, 1024, 8192, 8192]


def test_progress_is_shown_in_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    line = Line()
    line.show(lambda: "40 %")  # too early: prints nothing
    line.show(lambda: f"100 %, {line.left(1, 1)}", last=True)
    Line(quiet=True).show(lambda: "not shown", last=True)
    assert capsys.readouterr().err == "100 %, about 0:00:00 left\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*FAULTS, *MORE])
def test_planted_faults_are_found(name: str, base: Path, tmp_path: Path) -> None:
    with planted(name, {**FAULTS, **MORE}[name], tmp_path) as faulty:
        code, result = parity(base, faulty, out=tmp_path / "out")
    print(name, result["verdict"], result["reasons"])
    if name == "rms_norm_eps":  # 4 to 5 times the noise of float32: so few texts may be inconclusive
        assert code in (1, 3), result["reasons"]
    else:
        assert (code, result["verdict"]) == (1, "different"), result["reasons"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_changes_are_judged_equal(name: str, base: Path, tmp_path: Path) -> None:
    code, result = parity(base, " ".join(["demo", *HARMLESS[name]]), out=tmp_path / "out")
    print(name, result["verdict"], result["reasons"])
    assert (code, result["verdict"]) == (0, "equal"), result["reasons"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "size"), [("--dtype bfloat16", "bf16"), ("--kv-cache-dtype fp8", "fp8-kv")]
)
def test_a_change_of_precision_is_recognised(options: str, size: str, base: Path, tmp_path: Path) -> None:
    code, result = parity(base, f"demo {options}", "--expect", size, out=tmp_path / "out")
    print(options, result["verdict"], result["reasons"])
    assert (code, result["verdict"], result["precision"]) == (0, "precision", size), result["reasons"]
    recorded = str(tmp_path / "out" / "b.npz")
    assert main(["eval", "parity", str(base), recorded]) == 1  # fails unless it is expected


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, other = str(tmp_path / "missing.npz"), tmp_path / "other.npz"
    other.write_text("{}")
    for arguments, message in [
        ([missing, "demo"], "no such recording; write one with: chorale eval parity record"),
        (["demo", str(other)], "give the recording first"),
        ([str(other), "demo"], "not a recording"),
        (["ftp://host", "demo", "--lengths", "8"], "'8' is not a number: it must be 16 to 131072"),
        (["demo", "demo", "--lengths", "a"], "'a' is not a number: it must be 16 to 131072"),
        (["demo", "demo", "--texts", "0"], "it must be 1 to 1000"),
        (["http://127.0.0.1:1/v1", "demo"], "no server at http://127.0.0.1:1/v1"),
        (['demo "', "demo"], "No closing quotation"),
        (["record", "demo", "-o", str(tmp_path / "no" / "where.npz")], "no such folder"),
        (["record", str(other), "-o", str(tmp_path / "x.npz")], "is a recording already"),
    ]:
        assert main(["eval", "parity", *arguments]) == 2, arguments
        assert message in capsys.readouterr().err
