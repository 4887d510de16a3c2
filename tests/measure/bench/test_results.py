"""Results of benchmarks: numbers, the printed block, files and the report."""

from __future__ import annotations

import html.parser
import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Literal

import httpx2
import pytest

from chorale.cli.commands.measure.bench_options import serve_parser
from chorale.cli.commands.measure.bench_pace import goals_of
from chorale.cli.commands.measure.bench_serve import check, make_requests, write
from chorale.cli.main import main
from chorale.errors import ConfigError
from chorale.harmony.vocab import load_vocabulary
from chorale.measure.bench.load import Outcome, Pace
from chorale.measure.bench.load_processes import share
from chorale.measure.bench.metrics import block, percentile, summarise, to_json
from chorale.measure.bench.prompts import RandomLengths, file_prompts, random_prompts, request_for
from chorale.measure.bench.report import _ticks, page, read, write_report
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.server import in_thread

GOOD = [
    Outcome(start=0.0, ttft=0.1, latency=1.1, itl=[0.5, 0.5], prompt_tokens=10, output_tokens=11),
    Outcome(start=0.5, ttft=0.3, latency=1.3, itl=[1.0], prompt_tokens=20, output_tokens=3),
]
BAD = Outcome(error="HTTP 500: no")


def test_percentiles_are_linear() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([], 99) == 0.0


def test_the_summary_covers_only_completed_requests() -> None:
    summary = summarise([*GOOD, BAD], 2.0)
    assert (summary.completed, summary.failed) == (2, 1)
    assert summary.output_throughput == 7.0
    assert summary.total_token_throughput == 22.0
    assert summary.latencies["tpot"] == pytest.approx([100.0, 500.0])
    assert summary.max_concurrent_requests == 2
    assert summary.errors == ("HTTP 500: no",)


def test_the_warm_up_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every request has three tokens; the warm-up is not counted."""
    client = ScriptedClient(lambda request, index: Script([100, 101, 102], finish_reason="length"))
    with in_thread(client, names=("demo",)) as server:
        line = ["bench", "serve", "--base-url", f"http://127.0.0.1:{server.port}", "--num-prompts", "4"]
        line += [
            "--random-input-len",
            "8",
            "--random-output-len",
            "3",
            "--num-warmups",
            "2",
            "--save-result",
        ]
        assert main([*line, "--result-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert ("4/4" in shown.err, "4/4" in shown.out) == (True, False)  # the progress bar
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert (found["completed"], found["total_output_tokens"], len(client.requests)) == (4, 12, 6)


def test_the_block_has_the_lines_that_scripts_read() -> None:
    text = block(
        summarise(GOOD, 2.0), rate=4.0, concurrency=8, metrics=["ttft", "tpot"], percentiles=[90.0, 99.0]
    )
    found = dict(line.rsplit(":", 1) for line in text.splitlines() if ":" in line)
    assert float(found["Output token throughput (tok/s)"]) == 7.0
    assert float(found["Total Token throughput (tok/s)"]) > 7.0
    assert int(found["Successful requests"]) == 2
    assert float(found["Median TTFT (ms)"]) == 200.0
    assert float(found["P90 TPOT (ms)"]) == 460.0
    assert float(found["Request rate configured (RPS)"]) == 4.0
    assert text.splitlines()[0] == "============ Serving Benchmark Result ============"
    assert "-----Time per Output Token (excl. 1st token)------" in text
    assert {len(line) for line in text.splitlines() if line[0] in "=-"} == {50}


def test_goodput_counts_requests_that_met_every_goal() -> None:
    """vLLM's line and key. A single token has a tpot of 0, and a failed request is never good."""
    lone = Outcome(start=0.0, ttft=0.05, latency=0.05, prompt_tokens=1, output_tokens=1)
    made = [*GOOD, lone, BAD]
    assert summarise(made, 2.0).request_goodput is None
    assert summarise(made, 2.0, goals_of(["ttft:200", "tpot:100.5"])).request_goodput == 1.0
    assert summarise(made, 2.0, goals_of(["e2el:1300.001"])).request_goodput == 1.5
    summary = summarise(made, 2.0, goals_of(["ttft:0"]))
    assert to_json(summary, [99.0])["request_goodput"] == 0.0
    text = block(summary, rate=4.0, concurrency=None, metrics=["ttft"], percentiles=[99.0])
    lines = [line.partition(":")[0] for line in text.splitlines()]
    assert lines.index("Request goodput (req/s)") == lines.index("Request throughput (req/s)") + 1
    assert "goodput" not in block(
        summarise(made, 2.0), rate=4.0, concurrency=None, metrics=["ttft"], percentiles=[99.0]
    )


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 55.0), ("exponential", 31.6)])
def test_a_ramp_ends_at_its_last_rate(strategy: Literal["linear", "exponential"], middle: float) -> None:
    """Checks the rate at the beginning, in the middle and at the end, and the share of one process."""
    pace = Pace(10.0, 1e6, ramp=strategy, last_rate=100.0)  # nearly constant gaps, which give the rate
    starts = list(pace.starts(1001))
    rates = [1 / (later - earlier) for earlier, later in pairwise(starts)]
    assert [rates[0], rates[500], rates[-1]] == pytest.approx([10.0, middle, 100.0], rel=0.02)
    one = share(pace, 1, 4)
    assert (one.rate, one.last_rate, one.ramp) == (2.5, 25.0, strategy)


def test_output_lengths_come_from_the_option_or_the_dataset(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "output_tokens": 9}\n')
    for length, expected in (("5", 5), ("-1", 9)):
        given = serve_parser().parse_args(
            ["--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", length]
        )
        check(given)
        body = json.loads(make_requests(given, "/v1/completions", "m")[0].body)
        assert body["max_tokens"] == expected


def test_results_have_the_keys_of_vllm() -> None:
    found = to_json(summarise(GOOD, 2.0), [99.0])
    for name in ("duration", "completed", "output_throughput", "mean_ttft_ms", "p99_itl_ms", "std_tpot_ms"):
        assert isinstance(found[name], int | float)


def test_random_prompts_have_the_given_lengths_and_share_no_prefix() -> None:
    prompts = list(random_prompts(50, RandomLengths(100, 20, 0.2), seed=1))
    assert all(80 <= each.num_tokens <= 120 and 16 <= each.output_tokens <= 24 for each in prompts)
    assert len({tuple(each.content[:4]) for each in prompts}) == 50
    again = list(random_prompts(50, RandomLengths(100, 20, 0.2), seed=1))
    assert prompts == again
    text = next(random_prompts(1, RandomLengths(30, 5), 1, as_text=load_vocabulary()))
    assert isinstance(text.content, str)


def test_prompt_files_are_read_by_kind(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "Hello there", "output_tokens": 9}\n\n{"prompt": "x"}\n')
    found = file_prompts(lines, "custom", load_vocabulary(), None)
    assert [(each.num_tokens, each.output_tokens) for each in found] == [(2, 9), (1, 128)]
    lines.write_text('{"prompt": "a\u2028b\x85"}\r\n', encoding="utf-8")
    assert file_prompts(lines, "custom", load_vocabulary(), None)[0].content == "a\u2028b\x85"
    share = tmp_path / "b.json"
    share.write_text(
        json.dumps([{"conversations": [{"value": "a b"}, {"value": "c d e"}]}, {"conversations": []}])
    )
    assert file_prompts(share, "sharegpt", load_vocabulary(), None)[0].output_tokens == 3
    with pytest.raises(ConfigError, match="not a custom file"):
        file_prompts(share, "custom", load_vocabulary(), None)


def test_request_bodies_match_their_endpoint() -> None:
    prompt = next(random_prompts(1, RandomLengths(3, 5), 1))
    raw = json.loads(
        request_for(prompt, endpoint="/v1/completions", model="m", ignore_eos=True, extra={"top_p": 0.5}).body
    )
    assert (raw["max_tokens"], raw["ignore_eos"], raw["top_p"], len(raw["prompt"])) == (5, True, 0.5, 3)
    chat = json.loads(
        request_for(prompt, endpoint="/v1/chat/completions", model="m", ignore_eos=False, extra={}).body
    )
    assert chat["max_completion_tokens"] == 5
    assert "ignore_eos" not in chat


class Checker(html.parser.HTMLParser):
    """Fails on anything that would be fetched."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "link", "iframe")
        assert not any(name in ("src", "href") for name, _ in attrs)


def test_the_report_is_one_page_without_external_resources(tmp_path: Path) -> None:
    paths = []
    for limit in (8, 1, 64):
        record = {"kind": "serve", "machine": {"cpu": "<b>", "gpus": []}, "max_concurrency": limit}
        record |= to_json(summarise(GOOD, 2.0), [99.0])
        paths.append(tmp_path / f"{limit}.json")
        paths[-1].write_text(json.dumps(record))
    rng = random.Random(1)
    kernel = {"kernel": "qkv", "case": "1", "us": rng.random(), "gb_s": 1.0, "tflop_s": 2.0, "share": 0.5}
    paths.append(tmp_path / "k.json")
    paths[-1].write_text(json.dumps({"kind": "kernels", "machine": {}, "kernels": [kernel]}))
    out = tmp_path / "out.html"
    write_report(paths, out)
    text = out.read_text()
    Checker().feed(text)
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert text.index("1 at once") < text.index("8 at once") < text.index("64 at once")
    assert text.count("<svg") == 3
    assert page([]).startswith("<!doctype html>")


@pytest.mark.parametrize("most", [0.02, 0.3, 1.0, 7.4, 9.99, 37.6, 1024.0, 29893.0, 2.5e6])
def test_an_axis_has_a_few_round_numbers(most: float) -> None:
    ticks = _ticks(most)
    assert ticks[0] == 0
    assert ticks[-2] < most <= ticks[-1] * 1.001
    assert 3 <= len(ticks) <= 6
    assert all(len(f"{tick:.10g}".replace(".", "").rstrip("0").lstrip("0")) <= 3 for tick in ticks)


def test_labels_of_points_stay_inside_the_plot() -> None:
    records = [
        {"kind": "serve", "max_concurrency": limit, "completed": 1, "median_ttft_ms": ttft}
        | {"output_throughput": speed, "median_tpot_ms": tpot}
        for limit, speed, ttft, tpot in (
            (1, 680.0, 7.4, 1.46),
            (64, 9343.0, 357.0, 6.1),
            (1024, 27679.0, 1405.0, 34.8),
        )
    ]
    found = re.findall(r"<text x=([\d.]+) y=([\d.]+) text-anchor=(\w+)>(\d+ at once)", page(records))
    assert len(found) == 6
    for x, y, anchor, name in found:
        ends = (
            (float(x) - 7 * len(name), float(x)) if anchor == "end" else (float(x), float(x) + 7 * len(name))
        )
        assert 70 <= ends[0] < ends[1] <= 900
        assert 14 < float(y) < 320


@pytest.mark.parametrize("text", ["[]", '{"kind": "serve"}', '{"kind": "speed"}', '{"kind": "kernels"}'])
def test_an_invalid_result_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read(path)


def test_the_report_accepts_any_percentiles(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"kind": "serve"} | to_json(summarise(GOOD, 2.0), [50.0, 90.0])))
    assert "median TTFT" in page([read(path)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "unknown benchmark"),
        (["serve", "--num-prompts", "0"], "--num-prompts"),
        (["serve", "--num-warmups", "-1"], "--num-warmups must be at least 0"),
        (["serve", "--output-len", "0"], "--output-len must be at least 1"),
        (["serve", "--random-prefix-len", "-1"], "--random-prefix-len"),
        (["serve", "--client-processes", "0"], "--client-processes"),
        (["serve", "--max-concurrency", "0"], "--max-concurrency"),
        (["serve", "--percentile-metrics", "speed"], "speed"),
        (["serve", "--dataset-name", "custom"], "--dataset-path"),
        (["serve", "--random-range-ratio", "1"], "--random-range-ratio"),
        (["serve", "--metric-percentiles", "half"], "--metric-percentiles half"),
        (["serve", "--metric-percentiles", "99,101"], "from 0 to 100"),
        (["serve", "--metadata", "gpu"], "--metadata 'gpu'"),
        (["kernels", "--batch-sizes", "1,many"], "--batch-sizes 1,many"),
        (["serve", "--num-prompts", "1", "--request-rate", "nan"], "--request-rate"),
        (["serve", "--num-prompts", "1", "--burstiness", "nan"], "--burstiness"),
        (["serve", "--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (["serve", "--ramp-up-end-rps", "5"], "need --ramp-up-strategy"),
        (["serve", "--ramp-up-strategy", "linear", "--request-rate", "5"], "cannot be combined"),
        (["serve", "--ramp-up-strategy", "exponential", "--ramp-up-start-rps", "0"], "above 0"),
        (["serve", "--goodput", "ttft:200", "itl:5"], "--goodput 'itl:5'"),
        (["serve", "--goodput", "ttft:soon"], "--goodput 'ttft:soon'"),
        (["serve", "--sharegpt-output-len", "0"], "--sharegpt-output-len must be at least 1"),
        (["serve", "--extra-body", "5"], "--extra-body must be a JSON object"),
        (["serve", "--extra-body", "{top_k: 5}"], "--extra-body '{top_k: 5}': is not JSON"),
        (["serve", "--result-dir", "/", "--result-filename", "tmp"], "--result-filename tmp: is a folder"),
        (["serve", "--save-result", "--result-dir", f"{__file__}/results"], "--result-dir"),
        (["latency", "--batch-size", "0"], "--batch-size"),
        (["latency", "--seed", "-1"], "--seed must be at least 0"),
        (["throughput", "--seed", "-1"], "--seed must be at least 0"),
        (["latency", "--output-json", f"{__file__}/result.json"], "--output-json"),
        (["startup", "--json", "/"], "--output-json /: cannot be written to"),
        (["startup", "--no-such-flag"], "no-such-flag"),
        (["startup", "--num-iters-warm", "-1"], "--num-iters-warm must be at least 0"),
        (["startup", "--num-iters-cold", "0", "--num-iters-warm", "0"], "nothing to measure"),
        (["startup", "--timeout", "nan"], "--timeout must be above 0"),
        (["make-checkpoint", "20b", __file__], "not a folder"),
        (["make-checkpoint", "20b", "/new", "--threads", "0"], "--threads must be at least 1"),
    ],
)
def test_wrong_arguments_are_explained(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["latency", "--batch-size", "1"],
            2,
            "--input-len 60 and --output-len 5 are more than --max-model-len 64",
        ),
        (["throughput", "--num-prompts", "1"], 2, "--max-model-len 64"),
        (
            ["throughput", "--num-prompts", "1", "--input-len", "9", "--temperature", "-1"],
            1,
            "temperature must",
        ),
    ],
)
def test_requests_that_the_engine_refuses_are_explained(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--max-model-len", "64", "--num-threads", "1", "--device", "cpu"]
    what, *rest = arguments
    assert main(["bench", what, "--input-len", "60", "--output-len", "5", *rest, *small]) == code
    assert words in capsys.readouterr().err


def test_an_unreachable_server_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for where in (["--port", "9"], ["--host", "::1", "--port", "9"], ["--base-url", "http://localhost:9/v1"]):
        assert main(["bench", "serve", *where, "--num-prompts", "1"]) == 1
        assert "no server at" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", "http://localhost:x", "--num-prompts", "1"]) == 2


def test_a_column_that_only_a_later_result_has_is_shown() -> None:
    cold = {"kind": "startup", "cold_healthy_seconds": 9.5}
    shown = page([cold, cold | {"warm_healthy_seconds": 3.25}])
    assert "<th>warm healthy seconds</th>" in shown
    assert "<td>3.25</td>" in shown


def test_an_error_response_is_not_reported_as_no_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = httpx2.Response(401, json={"error": {"message": "a valid API key is needed"}})
    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", lambda *_: refusal)
    assert main(["bench", "serve", "--num-prompts", "1"]) == 1
    shown = capsys.readouterr().err
    assert "HTTP 401" in shown
    assert "a valid API key is needed" in shown
    assert "OPENAI_API_KEY" in shown
    assert "no server at" not in shown


def test_a_slash_in_a_label_does_not_create_a_folder(tmp_path: Path) -> None:
    given = serve_parser().parse_args(["--label", "openai/gpt-oss-20b", "--result-dir", str(tmp_path)])
    path = write(given, "openai/gpt-oss-20b", {"date": "today"})
    assert path.parent == tmp_path
    assert json.loads(path.read_text()) == {"date": "today"}
