"""``chorale bench serve``, with vLLM's flags, printed block and result-file keys."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chorale.cli.commands.measure.bench_pace import add_pace, goals_of, pace_of, ramp_words
from chorale.cli.commands.measure.vllm_options import add_vllm_options
from chorale.config.engine import check_least
from chorale.config.options.parser import Parser
from chorale.config.sampling_fields import CHOSEN_BY_MODEL, SAMPLING_FIELDS
from chorale.errors import ChoraleError, ConfigError
from chorale.harmony.vocab import load_vocabulary
from chorale.machine.facts import fingerprint
from chorale.machine.folders import write_whole
from chorale.machine.hardware import cpu_count
from chorale.measure.bench.connection import Target
from chorale.measure.bench.drafts import DraftCounts
from chorale.measure.bench.load import LoadRequest, Outcome, Pace
from chorale.measure.bench.load_processes import run_load
from chorale.measure.bench.metrics import TITLES, block, summarise, to_json
from chorale.measure.bench.prompts import (
    CHAT_ENDPOINT,
    RandomLengths,
    file_prompts,
    random_prompts,
    request_for,
)
from chorale.requests.openai_client import Client, Endpoint, api_url

BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": CHAT_ENDPOINT,
    "sglang-oai": "/v1/completions",
    "sglang-oai-chat": CHAT_ENDPOINT,
}


def parser() -> Parser:
    made = Parser(
        "chorale bench serve",
        usage="chorale bench serve [options]",
        description="Measure a running server under load. Flags, output and result keys are vLLM's.",
    )
    where = made.add_argument_group("server")
    where.add_argument("--backend", choices=sorted(BACKENDS), default="openai", help="API to use")
    where.add_argument("--base-url", help="http://HOST:PORT (instead of --host and --port)")
    where.add_argument("--host", default="127.0.0.1", help="host of the server")
    where.add_argument("--port", type=int, default=8000, help="port of the server")
    where.add_argument("--endpoint", help="path (default: the backend's)")
    where.add_argument("--model", help="model name (default: the server's first)")
    where.add_argument("--served-model-name", help="model name to send, if it differs from --model")
    where.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="header to send with each request"
    )
    what = made.add_argument_group("workload")
    what.add_argument(
        "--dataset-name",
        choices=("random", "custom", "sharegpt"),
        default="random",
        help="source of the prompts",
    )
    what.add_argument(
        "--dataset-path",
        type=Path,
        help="file with the dataset custom (JSON lines with a prompt) or sharegpt",
    )
    what.add_argument("--num-prompts", type=int, default=1000, help="number of requests")
    what.add_argument(
        "--input-len",
        "--random-input-len",
        dest="input_len",
        type=int,
        default=1024,
        help="prompt length in tokens",
    )
    what.add_argument(
        "--output-len", "--random-output-len", dest="output_len", type=int, help="output length in tokens"
    )
    for name, kind in (("custom", answer_length), ("sharegpt", int)):
        what.add_argument(f"--{name}-output-len", type=kind, metavar="N", help=f"output length for {name}")
    what.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="lengths vary by up to this fraction"
    )
    what.add_argument(
        "--random-prefix-len", type=int, default=0, help="length of a prefix common to all prompts"
    )
    what.add_argument("--ignore-eos", action="store_true", help="always generate the full output length")
    what.add_argument("--seed", type=int, default=0, help="seed of prompts, lengths and arrival times")
    what.add_argument(
        "--extra-body", type=_json, default={}, metavar="JSON", help="fields to add to each body"
    )
    for name in CHOSEN_BY_MODEL:
        number = int if SAMPLING_FIELDS[name].type == "integer" else float
        what.add_argument("--" + name.replace("_", "-"), type=number, help=SAMPLING_FIELDS[name].doc)
    add_pace(made)
    _add_results(made)
    add_vllm_options(made, "serve")
    return made


def _add_results(made: Parser) -> None:
    result = made.add_argument_group("results")
    result.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", help="metrics to print")
    result.add_argument("--metric-percentiles", default="99", help="percentiles, separated by commas")
    result.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count the requests that stay within these limits for ttft, tpot, e2el",
    )
    result.add_argument("--save-result", action="store_true", help="write a JSON file")
    result.add_argument("--save-detailed", action="store_true", help="include each request in the file")
    result.add_argument("--result-dir", type=Path, default=Path(), help="folder of the file")
    result.add_argument("--result-filename", help="name of the file (default: from rate, model and date)")
    result.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="entries to add to the file"
    )
    result.add_argument("--label", help="prefix of the file name")
    result.add_argument(
        "--disable-tqdm", "--no-progress", dest="quiet", action="store_true", help="show no progress bar"
    )


PARSERS = {"serve": parser}


def answer_length(text: str) -> int | None:
    """Parses an output length. Returns None for ``-1``, vLLM's notation for the dataset's own lengths."""
    length = int(text)
    return None if length == -1 else length


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body {text!r}: is not JSON ({error})") from None


def run(_: str, arguments: list[str]) -> int:
    given = parser().read(arguments)
    pace = check(given)
    host = f"[{given.host}]" if ":" in given.host else given.host
    base = api_url(given.base_url or f"http://{host}:{given.port}", "--base-url").removesuffix("/v1")
    endpoint = given.endpoint or BACKENDS[given.backend]
    headers = list(_pairs(given.header, "--header"))
    key = os.environ.get("OPENAI_API_KEY")
    if key and not any(name.lower() == "authorization" for name, _ in headers):
        headers.append(("authorization", f"Bearer {key}"))
    model = given.served_model_name or given.model or first_model(base, headers)
    requests = make_requests(given, endpoint, model)
    target = Target(base + endpoint, tuple(headers))
    if pace.ramp:
        print(ramp_words(pace))
    warm_up(target, requests, given.num_warmups)
    before = draft_counts(base, headers)
    outcomes, seconds = loaded(target, pace, requests[given.num_warmups :], given)
    after = draft_counts(base, headers) if before is not None else None
    drafts = after.since(before) if before is not None and after is not None else None
    return conclude(given, model, outcomes, seconds, drafts)


def draft_counts(base: str, headers: list[tuple[str, str]]) -> DraftCounts | None:
    """Returns the server's counters of drafts, or None if it exposes none."""
    try:
        with Client(Endpoint(base, headers=tuple(headers))) as client:
            answer = client.get("/metrics")
    except httpx2.HTTPError:
        return None
    return DraftCounts.of_metrics(answer.text) if answer.status_code == 200 else None


def check(given: argparse.Namespace) -> Pace:
    """Checks the options before any request is sent and returns the schedule. Raises ``ConfigError``."""
    least = dict.fromkeys(("num_prompts", "input_len", "output_len", "port"), 1)
    least |= dict.fromkeys(("custom_output_len", "sharegpt_output_len"), 1)
    least |= dict.fromkeys(("max_concurrency", "client_processes"), 1)
    least |= dict.fromkeys(("num_warmups", "random_prefix_len"), 0)
    check_least(given, least)
    if not 0 <= given.random_range_ratio < 1:
        raise ConfigError("--random-range-ratio must be at least 0 and below 1")
    unknown = [name for name in given.percentile_metrics.split(",") if name not in TITLES]
    if unknown:
        raise ConfigError(f"--percentile-metrics: {unknown[0]!r} is not one of {', '.join(TITLES)}")
    if not isinstance(given.extra_body, dict):
        raise ConfigError("--extra-body must be a JSON object")
    # These are used after the run. They are checked now so that a mistake does not cost the whole run.
    _percentiles(given.metric_percentiles)
    _pairs(given.metadata, "--metadata")
    goals_of(given.goodput)
    if saves(given):
        _check_result_path(given)
    if given.dataset_name != "random" and given.dataset_path is None:
        raise ConfigError(f"--dataset-name {given.dataset_name} needs --dataset-path")
    return pace_of(given)


def saves(given: argparse.Namespace) -> bool:
    return bool(given.save_result or given.save_detailed or given.result_filename)


def _check_result_path(given: argparse.Namespace) -> None:
    path = given.result_dir / (given.result_filename or "file")
    if path.is_dir():
        raise ConfigError(f"--result-filename {given.result_filename}: is a folder")
    _make_folder(path.parent)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--result-dir {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--result-dir {folder}: is not writable")


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= share <= 100 for share in found):
        raise ConfigError(f"--metric-percentiles {text}: must be numbers from 0 to 100 separated by commas")
    return found


def _pairs(texts: list[str], flag: str) -> list[tuple[str, str]]:
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"{flag} {text!r}: must be NAME=VALUE")
    return [(text.partition("=")[0], text.partition("=")[2]) for text in texts]


def first_model(base: str, headers: list[tuple[str, str]]) -> str:
    """Returns the name of the server's first model. Raises ``ChoraleError``."""
    try:
        with Client(Endpoint(f"{base}/v1", headers=tuple(headers))) as client:
            return client.first_model()
    except ConfigError as error:  # not an error in the options
        raise ChoraleError(error.message) from None


def make_requests(given: argparse.Namespace, endpoint: str, model: str) -> list[LoadRequest]:
    """Returns the requests of a run, warm-ups first."""
    extra: dict[str, Any] = {
        name: getattr(given, name) for name in CHOSEN_BY_MODEL if getattr(given, name) is not None
    }
    extra |= given.extra_body
    count = given.num_prompts + given.num_warmups
    if given.dataset_name == "random":
        lengths = RandomLengths(given.input_len, given.output_len or 128, given.random_range_ratio)
        as_text = load_vocabulary() if endpoint.rstrip("/").endswith("/chat/completions") else None
        prompts = list(
            random_prompts(count, lengths, given.seed, as_text=as_text, prefix=given.random_prefix_len)
        )
    else:
        length = getattr(given, f"{given.dataset_name}_output_len") or given.output_len
        found = file_prompts(given.dataset_path, given.dataset_name, load_vocabulary(), length)
        prompts = [found[number % len(found)] for number in range(count)]
    return [
        request_for(each, endpoint=endpoint, model=model, ignore_eos=given.ignore_eos, extra=extra)
        for each in prompts
    ]


def warm_up(target: Target, requests: list[LoadRequest], count: int) -> None:
    """Sends uncounted requests, at least one. Raises ``ChoraleError`` if one fails."""
    outcomes, _ = run_load(target, Pace(concurrency=count or 1), requests[: count or 1], 1, lambda _: None)
    errors = [each.error for each in outcomes if each.error]
    if errors:
        raise ChoraleError(f"the first request failed: {errors[0]}")


def loaded(
    target: Target, pace: Pace, requests: list[LoadRequest], given: argparse.Namespace
) -> tuple[list[Outcome], float]:
    at_once = pace.concurrency or len(requests)
    processes = given.client_processes or max(1, min(at_once // 256, cpu_count() // 4))
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=given.quiet, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(requests))
        return run_load(target, pace, requests, processes, lambda _: progress.advance(bar))


def conclude(
    given: argparse.Namespace,
    model: str,
    outcomes: list[Outcome],
    seconds: float,
    drafts: DraftCounts | None = None,
) -> int:
    summary = summarise(outcomes, seconds, goals_of(given.goodput))
    percentiles = _percentiles(given.metric_percentiles)
    metrics = given.percentile_metrics.split(",")
    print(
        block(
            summary, rate=given.request_rate, concurrency=given.max_concurrency, metrics=metrics,
            percentiles=percentiles, drafts=drafts,
        )
    )  # fmt: skip
    for error in sorted(set(summary.errors))[:5]:
        print(f"{summary.errors.count(error)} failed: {error}")
    if saves(given):
        record: dict[str, Any] = {
            "kind": "serve", "machine": fingerprint(), "date": time.strftime("%Y%m%d-%H%M%S"),
            "backend": given.backend, "model_id": model, "label": given.label,
            "num_prompts": given.num_prompts,
            "request_rate": "inf" if given.request_rate == float("inf") else given.request_rate,
            "burstiness": given.burstiness, "max_concurrency": given.max_concurrency,
            "ramp_up_strategy": given.ramp_up_strategy, "ramp_up_start_rps": given.ramp_up_start_rps,
            "ramp_up_end_rps": given.ramp_up_end_rps,
        } | dict(_pairs(given.metadata, "--metadata")) | to_json(summary, percentiles)  # fmt: skip
        record |= {} if drafts is None else drafts.to_json()
        if given.save_detailed:
            record |= {
                "ttfts": [each.ttft for each in outcomes], "itls": [each.itl for each in outcomes],
                "output_lens": [each.output_tokens for each in outcomes],
                "input_lens": [each.prompt_tokens for each in outcomes],
                "start_times": [each.start for each in outcomes], "errors": [each.error for each in outcomes],
            }  # fmt: skip
        print(f"wrote {write(given, model, record)}")
    return 0 if summary.completed else 1


def _rate_name(given: argparse.Namespace) -> str:
    """Returns the part of the result file's name that gives the rate or the concurrency."""
    if given.ramp_up_strategy:
        return f"ramp-up-{given.ramp_up_start_rps:g}qps-{given.ramp_up_end_rps:g}qps"
    return f"concurrency{given.max_concurrency}" if given.max_concurrency else f"{given.request_rate}qps"


def write(given: argparse.Namespace, model: str, record: dict[str, Any]) -> Path:
    label = (given.label or given.backend).replace("/", "_")  # a model's name may contain a slash
    name = (
        given.result_filename or f"{label}-{_rate_name(given)}-{model.split('/')[-1]}-{record['date']}.json"
    )
    path = Path(given.result_dir / name)
    write_whole(path, json.dumps(record, indent=1))
    return path
