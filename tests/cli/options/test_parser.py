"""Options may be abbreviated as in vLLM, and errors of every command suggest the nearest name."""

from __future__ import annotations

import argparse

import pytest

from chorale.cli.commands.client.chat import chat_parser
from chorale.cli.commands.measure.bench_options import serve_parser
from chorale.cli.main import main
from chorale.config.options.parser import whole_names
from chorale.errors import ConfigError


def read(line: str) -> argparse.Namespace:
    return serve_parser().read(line.split())


def test_unambiguous_prefixes_are_accepted() -> None:
    given = read("--random-input 200 --random_output=7 --num-prompt 3 --percentile-m ttft --extra {}")
    assert (given.input_len, given.output_len, given.num_prompts) == (200, 7, 3)
    assert given.percentile_metrics == "ttft"


def test_a_complete_name_is_not_taken_as_a_prefix() -> None:
    assert read("--model m --seed 3 --host h").model == "m"
    assert read("--tokenizer x --tokenizer-m y --seed 4").seed == 4


def test_words_after_two_dashes_are_unchanged() -> None:
    assert whole_names(["--see", "--", "--see"], {"seed": "seed"}) == ["--seed", "--", "--see"]


def test_every_parser_accepts_prefixes() -> None:
    assert chat_parser().read(["--max-tok", "5", "--reasoning_eff", "low"]).max_tokens == 5


def test_ambiguous_prefixes_list_the_candidates() -> None:
    with pytest.raises(ConfigError) as caught:
        read("--random 5")
    for name in ("--random-input-len", "--random-output-len", "--random-prefix-len", "--random-range-ratio"):
        assert name in caught.value.message


def test_options_of_serve_may_be_abbreviated_in_bench() -> None:
    with pytest.raises(ConfigError, match=r"ambiguous option --max-num: .*--max-num-batched-tokens"):
        main_error("bench latency --max-num 3")


def main_error(line: str) -> None:
    from chorale.cli.commands.measure import bench

    command, *rest = line.split()
    assert command == "bench"
    bench.run(rest)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("benhc", "did you mean bench?"),
        ("bench latncy", "did you mean latency?"),
        ("bench serve --num-promts 3", "did you mean --num-prompts"),
        ("bench latency --max-modle-len 3", "did you mean --max-model-len"),
        ("bench report --outt x y", "did you mean --out"),
        ("bench kernels --contxt 3", "did you mean --context"),
        ("chat --max-tokns 3", "did you mean --max-tokens?"),
        ("complete --quik x", "did you mean --quick"),
        ("config shw", "did you mean show?"),
        ("config show --prot 1", "did you mean --port"),
        ("tools chek", "did you mean check?"),
        ("tools serve pyton", "did you mean python?"),
        ("tools check --pyton-tool x", "did you mean --python-tool"),
        ("vocab exprt x", "did you mean export?"),
        ("demo exprt x", "did you mean export?"),
        ("pull --revison x y", "did you mean --revision?"),
        ("list --jsn", "did you mean --json?"),
        ("chat --port 9000", "--url http://localhost:PORT"),
        ("rm gpt-oss:20b", "models--openai--gpt-oss-20b"),
        ("ps", "/v1/models"),
        ("fit demo --gpu h10", "did you mean h100"),
        ("fit demo --max-modle-len 3", "did you mean --max-model-len"),
        ("serve --max-model 3", "did you mean --max-model-len"),
        ("bench serve --num-prompts many", "--num-prompts: invalid int value: 'many'"),
        ("bench serve extra", "unexpected arguments: extra"),
    ],
)
def test_an_unknown_option_suggests_the_nearest_name(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.startswith("chorale: error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_end_to_end_latency_is_printed_by_default() -> None:
    """vLLM 0.26 prints it only on request."""
    assert read("").percentile_metrics == "ttft,tpot,itl,e2el"
    assert read("--percentile-metrics ttft").percentile_metrics == "ttft"
