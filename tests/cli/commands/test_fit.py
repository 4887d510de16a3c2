"""``chorale fit --gpu``: the engine's own arithmetic for a card that is not here."""

from __future__ import annotations

import pytest

from chorale.cli.commands.fit import take_gpus
from chorale.cli.gpus import MODELS, find_gpu, hardware_of
from chorale.cli.machine import read_links
from chorale.cli.main import main
from chorale.config import EngineConfig
from chorale.errors import ConfigError
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.hardware import check_gpus
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
     ("2xh100", "name the GPU once"), ("h100x8", "--tensor-parallel-size")],
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


def test_a_rank_of_several_has_its_share(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the weights and half of each token's keys and values: more than twice the context."""
    tokens = []
    for ranks in (1, 2, 8):
        code, shown = fit(f"gpt-oss-120b --gpu h100 --tensor-parallel-size {ranks}", capsys)
        assert code == 0
        (pool,) = (line for line in shown.splitlines() if line.startswith("KV pool"))
        tokens.append(int(pool.split(": ")[1].split()[0].replace(",", "")))
    assert "machine   8 ranks, each: H100" in shown
    assert "weights   8.11 GiB" in shown
    assert tokens[1] > 2 * tokens[0]
    assert tokens[2] > 4 * tokens[1]


def test_a_number_of_ranks_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = fit("gpt-oss-20b --gpu h100 --tensor-parallel-size 3", capsys)
    assert (code, "must be one of 1, 2, 4, 8" in shown) == (2, True)
    code, shown = fit("demo --device cpu --tensor-parallel-size 4", capsys)
    assert code == 1
    assert "2 KV heads" in shown
    assert "possible: 1, 2" in shown


@pytest.mark.parametrize(
    ("ranks", "gpus", "words"),
    [(8, 2, "needs 8 GPUs, and 2 are visible.*use --tensor-parallel-size 2"),
     (4, 3, "use --tensor-parallel-size 2"), (2, 1, "1 is visible"),
     (8, 0, "none is visible.*use --tensor-parallel-size 1, or --device cpu")],
)  # fmt: skip
def test_fewer_gpus_than_ranks(ranks: int, gpus: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_gpus(ranks, gpus)
    check_gpus(max(gpus, 1), gpus)


LINKS = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tSYS\tNODE\t0-47\t0
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1
NIC0\tPIX\tNODE\tSYS\t X

Legend:

  X    = Self
"""


def test_links_between_gpus() -> None:
    assert read_links(LINKS) == ["NV18", "SYS"]
    assert read_links("GPU0\t X \t0-47\t0\n") == []
    assert read_links("") == []
