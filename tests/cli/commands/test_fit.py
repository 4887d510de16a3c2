"""``chorale fit --gpu``: the engine's own arithmetic for a card that is not here."""

from __future__ import annotations

import pytest

from chorale.cli.commands.fit import take_gpus
from chorale.cli.gpus import MODELS, find_gpu, hardware_of
from chorale.cli.main import main
from chorale.config import EngineConfig
from chorale.errors import ConfigError
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.memory import gib
from chorale.runtime.resolve import resolve


def fit(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["fit", *line.split()])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


@pytest.mark.parametrize("name", ["h100", "H100", "NVIDIA H100 80GB", "h100-80", "H100_80GB"])
def test_names_in_any_form(name: str) -> None:
    assert find_gpu(name).name == "H100"


def test_every_name_and_alias_finds_its_own() -> None:
    for model in MODELS:
        for name in (model.name, *model.aliases):
            assert find_gpu(name) is model


@pytest.mark.parametrize(
    ("name", "words"),
    [("h10", "did you mean h100"), ("rtx-409", "did you mean rtx-4090"), ("zzz", "known GPUs: A100-40"),
     ("2xh100", "one device is served"), ("h100x8", "one device is served")],
)  # fmt: skip
def test_unknown_names(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_gpu(name)


def test_it_is_the_engines_own_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = fit("gpt-oss-20b --gpu h200 --max-num-seqs 64 --kv-cache-dtype fp8", capsys)
    assert code == 0
    config = EngineConfig(max_num_seqs=64, kv_cache_dtype="fp8")
    model = make_config(**SHAPES["20b"])
    resolved = resolve(config, model, hardware_of(find_gpu("h200")), can_overlap=True, can_capture=True)
    pool = gib(resolved.limits.num_blocks * resolved.geometry.bytes_per_block)
    assert f"KV pool   {pool}: {resolved.geometry.tokens_in(resolved.limits.num_blocks):,} tokens" in shown
    assert "--gpu-memory-utilization 0.92" in shown
    assert "139.78 GiB free of 140.40 GiB" in shown  # the driver holds some of an idle card
    assert "tokens/s for one stream" in shown


def test_what_does_not_fit_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = fit("120b --gpu 4090", capsys)
    assert code == 1
    assert "does not fit" in shown


def test_several_cards_are_several_answers(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = fit("120b --gpu h100,mi355x 4090", capsys)
    assert code == 1  # of the last
    assert [line.split()[1].rstrip(",") for line in shown.splitlines() if line.startswith("machine")] == [
        "H100", "MI355X", "RTX-4090",
    ]  # fmt: skip
    assert "AMD GPUs have not been tried" in shown


def test_the_model_may_follow_the_names() -> None:
    assert take_gpus(["--gpu", "h100", "gpt-oss-20b"]) == (["gpt-oss-20b"], ["h100"])
    assert take_gpus(["x", "--gpu=h100,h200", "--seed", "1"]) == (["x", "--seed", "1"], ["h100", "h200"])
    with pytest.raises(ConfigError, match="needs the name"):
        take_gpus(["x", "--gpu"])


def test_a_card_and_the_cpu_contradict(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = fit("20b --gpu h100 --device cpu", capsys)
    assert (code, "cannot be combined" in shown) == (2, True)


def test_replicas_on_gpus_and_on_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, alone = fit("20b --gpu h200", capsys)
    code, shown = fit("20b --gpu h200 --data-parallel-size 4", capsys)
    assert (one, code) == (0, 0)
    assert "engines   4, each on such a GPU (4 are needed); the figures below are for one" in shown
    assert [line for line in shown.splitlines() if not line.startswith("engines")] == alone.splitlines()
    monkeypatch.setattr("chorale.cli.commands.fit.available_memory", lambda: 16 * 2**30)
    _, shared = fit("20b --device cpu -dp 2", capsys)
    assert "engines   2, which share the memory and the cores; the figures below are for one" in shared
    assert "does not fit" in shared  # 8 GiB each
