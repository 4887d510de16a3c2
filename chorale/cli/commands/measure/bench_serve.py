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

from chorale.cli.commands.measure.bench_options import BACKENDS, serve_parser
from chorale.cli.commands.measure.bench_pace import goals_of, pace_of, ramp_words
from chorale.config.engine import check_least
from chorale.config.sampling_fields import CHOSEN_BY_MODEL
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
    RandomLengths,
    file_prompts,
    random_prompts,
    request_for,
)
from chorale.requests.openai_client import Client, Endpoint, api_url


def run(_: str, arguments: list[str]) -> int:
    given = serve_parser().read(arguments)
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
