"""``chorale fit``: the engine's sizing for named GPUs and for this machine."""

from __future__ import annotations

import re

import pytest

from chorale.cli.commands.machine.fit import take_gpus
from chorale.cli.main import main
from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.kernels.cpu.library import library
from chorale.machine.gpus import MODELS, find_gpu, find_gpus, hardware_of
from chorale.machine.hardware import check_gpus
from chorale.machine.links import name_links, read_links
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.sizing.memory import gib
from chorale.runtime.sizing.resolve import resolve


def fit(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["fit", *line.split()])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_every_name_and_alias_finds_its_gpu() -> None:
    for model in MODELS:
        for name in (model.name, *model.aliases):
            assert find_gpu(name) is model


def test_fit_agrees_with_the_sizing_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = fit("gpt-oss-20b --gpu h200 --max-num-seqs 64 --kv-cache-dtype fp8", capsys)
    assert code == 0
    config = EngineConfig(max_num_seqs=64, kv_cache_dtype="fp8")
    model = make_config(**SHAPES["20b"])
    resolved = resolve(config, model, hardware_of(find_gpu("h200")), can_overlap=True, can_capture=True)
    pool = gib(resolved.limits.num_blocks * resolved.geometry.bytes_per_block)
    assert f"KV pool   {pool}: {resolved.geometry.tokens_in(resolved.limits.num_blocks):,} tokens" in shown
    assert "--gpu-memory-utilization 0.92" in shown
    assert "139.78 GiB free of 140.40 GiB" in shown  # the driver uses some memory of an idle GPU
    assert "tokens/s for one stream" in shown


def test_each_named_gpu_gets_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = fit("120b --gpu h100,mi355x 4090", capsys)
    assert code == 1  # the last GPU is too small
    assert [line.split()[1].rstrip(",") for line in shown.splitlines() if line.startswith("machine")] == [
        "H100", "MI355X", "RTX-4090",
    ]  # fmt: skip
    assert "Chorale has never run on an AMD GPU" in shown


def test_the_model_may_follow_the_gpu_names() -> None:
    assert take_gpus(["--gpu", "h100", "gpt-oss-20b"]) == (["gpt-oss-20b"], ["h100"])
    assert take_gpus(["x", "--gpu=h100,h200", "--seed", "1"]) == (["x", "--seed", "1"], ["h100", "h200"])
    with pytest.raises(ConfigError, match="needs the name"):
        take_gpus(["x", "--gpu"])


def test_replicas_have_a_gpu_each_or_share_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, alone = fit("20b --gpu h200", capsys)
    code, shown = fit("20b --gpu h200 --data-parallel-size 4", capsys)
    assert (one, code) == (0, 0)
    assert "engines   4, each on such a GPU (4 are needed); the figures below are for one" in shown
    assert [line for line in shown.splitlines() if not line.startswith("engines")] == alone.splitlines()
    monkeypatch.setattr("chorale.cli.commands.machine.fit.available_memory", lambda: 16 * 2**30)
    _, shared = fit("20b --device cpu -dp 2", capsys)
    assert "engines   2, which share the memory and the cores; the figures below are for one" in shared
    assert "does not fit" in shared  # 8 GiB each


@pytest.mark.skipif(library().functions is None, reason="the CPU kernels are not built")
def test_the_cpu_kernels_round_dense_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """20b has 1.8 billion dense parameters; the embedding's 0.58 billion are not rounded."""
    _, exact = fit("20b --device cpu --cpu-precision exact --max-model-len 1024", capsys)
    _, rounded = fit("20b --device cpu --max-model-len 1024", capsys)
    assert "12.82 GiB" in exact
    assert "11.75 GiB" in rounded
    _, reference = fit("20b --device cpu --ops reference --max-model-len 1024", capsys)
    assert "12.82 GiB" in reference


def test_a_rank_has_its_share_of_weights_and_kv(capsys: pytest.CaptureFixture[str]) -> None:
    """With half of the weights and of each token's keys and values, the context more than doubles."""
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


def test_an_impossible_number_of_ranks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_fewer_gpus_than_ranks_are_an_error(ranks: int, gpus: int, words: str) -> None:
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


def test_links_between_gpus_are_read() -> None:
    assert read_links(LINKS) == ["NV18", "SYS"]
    assert read_links("GPU0\t X \t0-47\t0\n") == []
    assert read_links("") == []
    assert read_links(LINKS, [0, 1]) == ["NV18"]
    assert read_links(LINKS, [1, 2]) == ["SYS"]
    assert [name_links(kinds) for kinds in (["NV18", "SYS"], ["PHB", "SYS"], [])] == [
        "NVLink (NV18), PCIe (SYS)", "PCIe (PHB, SYS)", ""
    ]  # fmt: skip


# --------------------------------------------------------------------------- several GPUs in one name


def rows(shown: str) -> dict[tuple[int, int], list[str]]:
    """Returns the rows of the table by (ranks, engines)."""
    found = {}
    for line in shown.splitlines():
        words = line.split()
        if len(words) > 2 and words[0].isdigit() and words[1].isdigit():
            found[int(words[0]), int(words[1])] = words[2:]
    return found


@pytest.mark.parametrize(
    ("name", "count", "model"),
    [("4xh100", 4, "H100"), ("8xh200", 8, "H200"), ("2XB200", 2, "B200"), ("1xh100", 1, "H100"),
     ("4 x NVIDIA H100 80GB", 4, "H100"), ("h100", None, "H100"), ("2xrtx-4090", 2, "RTX-4090"),
     ("H100_80GB", None, "H100"), ("8xMI300X", 8, "MI300X"), ("64xl4", 64, "L4")],
)  # fmt: skip
def test_a_gpu_name_may_begin_with_a_count(name: str, count: int | None, model: str) -> None:
    found = find_gpus(name)
    assert (found[0], found[1].name) == (count, model)


@pytest.mark.parametrize(
    ("name", "words"),
    [("0xh100", "the number of GPUs must be 1 to 64"), ("65xh100", "1 to 64"), ("-1xh100", "1 to 64"),
     ("9" * 6000 + "xh100", "1 to 64"), ("4x", "the name of the GPU is missing"),
     ("4xfoo", "unknown GPU; known GPUs: A100-40"), ("4xh10", "did you mean h100"),
     ("rtx-409", "did you mean rtx-4090"), ("zzz", "known GPUs: A100-40"),
     ("4x4xh100", "name the GPU once"), ("h100x4", "4xh100")],
)  # fmt: skip
def test_invalid_names_are_refused(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = fit(f"gpt-oss-120b --gpu={name}", capsys)
    assert code == 2
    assert words in shown
    assert shown.startswith(f"chorale: error: --gpu {name}: ")
    assert shown.count("\n") == 1


def test_the_ways_to_use_four_gpus_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = fit("gpt-oss-120b --gpu 4xh100", capsys)
    assert code == 0
    assert shown.startswith(
        "recommended  --tensor-parallel-size 2 --data-parallel-size 2: an engine needs 2 "
    )
    assert "machine      4 H100, each 79.02 GiB free of 79.65 GiB" in shown
    found = rows(shown)
    assert list(found) == [(1, 4), (2, 2), (4, 1)]
    for ranks, engines in found:  # equal to the report of that way alone
        _, alone = fit(f"gpt-oss-120b --gpu h100 -tp {ranks} -dp {engines}", capsys)
        weights, _, tokens, longest, long, short, speed = found[ranks, engines]
        assert f"weights   {weights} GiB" in alone
        assert f": {tokens} tokens of context" in alone
        (requests,) = (line for line in alone.splitlines() if line.startswith("requests"))
        full, few = (int(word.replace(",", "")) for word in (requests.split()[1], requests.split()[-4]))
        assert f"the maximum {longest} tokens" in requests
        assert (long, short) == (f"{engines * full:,}", f"{engines * few:,}")
        assert f"at most {speed.removesuffix('/s')} tokens/s" in alone


@pytest.mark.parametrize(
    ("line", "choice", "ways"),
    [("20b --gpu 8xh200", "--data-parallel-size 8: engines of one GPU", [(1, 8), (2, 4), (4, 2), (8, 1)]),
     ("120b --gpu 2XB200", "--data-parallel-size 2: ", [(1, 2), (2, 1)]),
     ("120b --gpu 1xh100", "one engine: it fits, with less room than for 131,072 tokens and 256", [(1, 1)]),
     ("120b --gpu 2xh100 -dp 2", "--data-parallel-size 2: it fits, with less room", [(1, 2)]),
     ("120b --gpu 1xh100 --max-num-seqs 64", "one engine: it has room for", [(1, 1)]),
     ("120b --gpu 4xh100 --tensor-parallel-size 4", "--tensor-parallel-size 4: it has room", [(4, 1)]),
     ("120b --gpu 6xh100 -dp 2", "--tensor-parallel-size 2 --data-parallel-size 2: ", [(1, 2), (2, 2)]),
     ("120b --gpu 8x4090", "--tensor-parallel-size 8: ", [(1, 8), (2, 4), (4, 2), (8, 1)]),
     ("demo --gpu 4xl4", "--data-parallel-size 4: ", [(1, 4), (2, 2)])],
)  # fmt: skip
def test_the_first_line_recommends_a_way(
    line: str, choice: str, ways: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = fit(line, capsys)
    assert code == 0
    assert shown.startswith(f"recommended  {choice}")
    assert list(rows(shown)) == ways


@pytest.mark.parametrize("rows_of_batch", [4, 64, 256, 1024])
def test_the_first_line_agrees_with_the_table(rows_of_batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The recommendation promises no more requests than the table shows, and than can run."""
    code, shown = fit(f"120b --gpu 8xascend-910b --max-num-seqs {rows_of_batch}", capsys)
    assert code == 0
    found = re.search(
        r"^recommended .*?(none of .* room for|less room than for|room for) 131,072 tokens and ([\d,]+) req",
        shown,
    )
    assert found is not None
    promised = int(found[2].replace(",", ""))
    assert promised == min(rows_of_batch, 256)
    of_short = int(rows(shown)[8, 1][5].replace(",", ""))
    assert (of_short >= promised) == (found[1] == "room for")


def test_a_model_that_does_not_fit_gets_a_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown = fit("120b --gpu 4090", capsys)
    assert code == 1
    [line] = [each for each in shown.splitlines() if each.startswith("remedy")]
    named = re.findall(r"such as ([^;]+) \(", line)[0].split(", ")
    assert len(named) == 3
    for name in named:
        assert fit(f"120b --gpu {name}", capsys)[0] == 0
    assert "close other programs" not in line
    monkeypatch.setattr("chorale.cli.commands.machine.fit.total_memory", lambda: 64 * 2**30)
    monkeypatch.setattr("chorale.cli.commands.machine.fit.available_memory", lambda: 4 * 2**30)
    _, shown = fit("20b --device cpu", capsys)
    assert "close other programs" in shown


def test_room_for_one_long_request_comes_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert "advice    for more requests at once: --kv-cache-dtype fp8" in fit("120b --gpu h100", capsys)[1]
    assert "--kv-cache-dtype" not in re.findall(
        "^advice.*", fit("120b --gpu h100 --kv-cache-dtype fp8", capsys)[1]
    )
    assert "advice" not in fit("120b --gpu h200", capsys)[1]


def test_the_documented_command_for_four_ascend_devices_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/how-to/accelerators/npu.md explains the numbers."""
    four = "120b --gpu 4xascend-910b --tensor-parallel-size 4 --max-model-len 4096 --max-num-seqs 4"
    assert fit(f"{four} --enable-expert-parallel", capsys)[0] == 0
    assert fit(four, capsys)[0] == 1
    assert fit(f"{four} --enable-expert-parallel --gpu-memory-utilization 0.9", capsys)[0] == 1


def test_idle_gpus_and_ways_that_do_not_fit_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _, shown = fit("120b --gpu 6xh100", capsys)
    assert {key: row[-2:] for key, row in rows(shown).items() if row[-1] == "idle)"} == {
        (4, 1): ["(2", "idle)"]
    }
    code, shown = fit("120b --gpu 2x4090", capsys)
    assert code == 1
    assert shown.startswith("recommended  none: the model does not fit")
    assert " ".join(rows(shown)[2, 1]).startswith("does not fit: the weights exceed the free memory by 7.")
    code, shown = fit("120b --gpu 2x4090 8xh100,h200", capsys)
    assert code == 1
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("machine")] == [
        "2",
        "8",
        "H200,",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [("120b --gpu 2xh100 -tp 4", "--tensor-parallel-size 4 needs 4 GPUs, not 2"),
     ("120b --gpu 4xh100 -tp 2 -dp 4",
      "--tensor-parallel-size 2 --data-parallel-size 4 needs 8 GPUs, not 4"),
     ("120b --gpu 4xh100 --max-model-len 200000", "more than the model's maximum"),
     ("demo --gpu 8xh100 -tp 4", "2 KV heads"), ("20b --gpu 4xh100 --device cpu", "cannot be combined")],
)  # fmt: skip
def test_impossible_ways_are_refused(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = fit(line, capsys)
    assert (code, words in shown) == (2, True)


@pytest.mark.parametrize(
    ("free", "options", "code", "words"),
    [(14, "", 0, "fits\n"), (12.7, "", 0, "fits, but only with "), (11.8, "", 1, "close other programs"),
     (12.45, "--kv-cache-memory-bytes 3G", 1, "exceed the free memory by"),
     (15.6, "--kv-cache-memory-bytes 3G", 0, "fits\n"), (12.7, "--max-model-len 1024", 0, "fits\n"),
     (14, "--kv-cache-dtype fp8", 1, "does not support an fp8 KV cache")],
)  # fmt: skip
@pytest.mark.skipif(library().functions is None, reason="the CPU kernels are not built")
def test_a_laptop_with_little_free_memory(
    free: float, options: str, code: int, words: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("chorale.cli.commands.machine.fit.total_memory", lambda: 16 * 2**30)
    monkeypatch.setattr("chorale.cli.commands.machine.fit.available_memory", lambda: int(free * 2**30))
    found, shown = fit(f"gpt-oss-20b --device cpu {options}", capsys)
    assert (found, words in shown) == (code, True), shown
    assert "another GPU" not in shown
    assert "-0." not in shown
