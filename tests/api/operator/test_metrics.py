"""Metrics: vLLM's names, counters that never decrease, sums over processes, and the cost of counting."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chorale.api.telemetry.engine_record import EngineRecord
from chorale.api.telemetry.metered_client import MeteredClient
from chorale.api.telemetry.metric_names import SLEEP_STATES
from chorale.api.telemetry.metrics import Metrics
from chorale.client.base import LEFT, EngineInfo, EngineStatus
from chorale.config.options.settings import merge
from chorale.config.options.vllm_flags import read_names
from chorale.engine.histogram import Histogram
from chorale.engine.types import EngineStats, GenerateRequest, SamplingSpec, TokenChunk
from chorale.errors import ConfigError, EngineDeadError, OverloadedError, QueueFullError
from chorale.store.store import SqliteStore
from tests.support.raw_http import call
from tests.support.scripted import scripted
from tests.support.server import served

ENGINE_0 = (("engine", "0"), ("model_name", "demo"))


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    own = {} if name.startswith("http_") else {"model_name": "demo", "engine": "0"}
    return samples(metrics)[name, tuple(sorted((own | labels).items()))]


def request(n: int = 1, prompt: int = 7, max_tokens: int | None = 50) -> GenerateRequest:
    sampling = SamplingSpec(n=n, max_tokens=max_tokens)
    return GenerateRequest(
        request_id="r", prompt_token_ids=[1] * prompt, sampling=sampling, arrival_time=time.time()
    )


async def drain(client: MeteredClient, wanted: GenerateRequest) -> None:
    async for _ in client.submit(wanted):
        pass


async def test_the_client_counts_every_request_and_token() -> None:
    metrics = Metrics("demo")
    client = MeteredClient(scripted([1, 2, 3, 200002], num_cached_tokens=5), metrics)
    await drain(client, request(n=2))
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 5
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 2
    assert value(metrics, "vllm:request_generation_tokens_sum") == 8
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 7
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 4
    assert value(metrics, "vllm:request_params_n_sum") == 2
    assert value(metrics, "vllm:request_params_max_tokens_sum") == 50
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 2
    assert 0 <= value(metrics, "vllm:e2e_request_latency_seconds_sum") < 600


async def test_time_per_output_token_is_the_mean_after_the_first_token() -> None:
    metrics = Metrics("demo")
    client = MeteredClient(scripted([1, 2, 3, 4, 200002], delay=0.05), metrics)
    await drain(client, request())
    between = value(metrics, "vllm:inter_token_latency_seconds_sum")
    assert between > 0.15
    mean = value(metrics, "vllm:request_time_per_output_token_seconds_sum")
    assert mean == pytest.approx(between / 4)  # five tokens have four gaps


async def test_errors_aborts_and_stops_are_counted() -> None:
    metrics = Metrics("demo")
    dying = MeteredClient(scripted([1], error=EngineDeadError("dead")), metrics)
    with pytest.raises(EngineDeadError):
        await drain(dying, request())
    hanging = MeteredClient(scripted([1, 2], hang=True), metrics)

    async def leave() -> None:
        stream = hanging.submit(request())
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()

    leaving = asyncio.create_task(leave())
    await asyncio.sleep(0.05)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    stream = hanging.submit(request())
    await stream.__anext__()
    await stream.aclose()  # as at a stop string
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "chorale:aborts_total", reason="engine") == 1
    assert value(metrics, "chorale:aborts_total", reason="disconnect") == 1


async def test_rejections_and_repairs_are_counted() -> None:
    metrics = Metrics("demo")
    inner = scripted()
    inner.max_in_flight = 0
    with pytest.raises(QueueFullError):
        MeteredClient(inner, metrics).submit(request())
    metrics.repaired({"cut_header": 2, "glued_token": 1})
    metrics.repaired({"cut_header": 1})
    metrics.rejected(OverloadedError("full", code="max_num_queued_tokens"))
    assert value(metrics, "chorale:queue_rejections_total") == 2
    reasons = {"max_queued_requests": 1, "max_num_queued_reqs": 0, "max_num_queued_tokens": 1}
    for reason, number in reasons.items():
        assert value(metrics, "vllm:admission_rejections_total", reason=reason) == number
    assert value(metrics, "chorale:harmony_repairs_total", kind="cut_header") == 3


class Engine:
    """The attributes of a client that a scrape reads."""

    def __init__(self) -> None:
        self.stats, self.status = EngineStats(), EngineStatus("ready")
        self.info = info(engine_id="a", num_blocks=100)
        self.engines: tuple[Engine, ...] = (self,)


def info(**fields: Any) -> EngineInfo:
    return EngineInfo(model="m", max_model_len=1, max_num_seqs=1, **fields)


def watched() -> tuple[Metrics, Engine]:
    metrics, engine = Metrics("demo"), Engine()
    metrics.watch(engine)  # type: ignore[arg-type]
    return metrics, engine


def test_engine_counters_do_not_decrease_when_the_engine_restarts() -> None:
    metrics, engine = watched()
    engine.stats = EngineStats(
        num_running=3,
        kv_blocks_used=25,
        kv_blocks_total=100,
        generation_tokens=500,
        num_steps=10,
        step_tokens=(0, 0, 0, 0, 2, *[0] * 9, 120.0),
    )
    assert value(metrics, "vllm:generation_tokens_total") == 500
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    again = (0, 1, *[0] * 12, 3.0)
    engine.stats = EngineStats(generation_tokens=20, num_steps=2, step_tokens=again)
    engine.info = info(engine_id="b")
    engine.status = EngineStatus("ready", restarts=1)
    assert value(metrics, "vllm:generation_tokens_total") == 520
    assert value(metrics, "chorale:engine_restarts_total") == 1
    assert value(metrics, "vllm:num_requests_running") == 0
    assert value(metrics, "vllm:iteration_tokens_total_count") == 3
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 123
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="8.0") == 1
    assert ("vllm:kv_block_lifetime_seconds_count", ENGINE_0) not in samples(metrics)  # off
    for restarts in (2, 4):  # between scrapes; before the last, a process died while it loaded
        engine.status = EngineStatus("dead", restarts=restarts)
        metrics.save()
    assert value(metrics, "chorale:engine_restarts_total") == 4
    engine.status = LEFT
    metrics.save()
    engine.status = EngineStatus("ready", restarts=1)  # another engine of a fleet at this place
    assert value(metrics, "chorale:engine_restarts_total") == 5


@pytest.mark.parametrize(
    ("state", "up"), [("ready", 1), ("draining", 1), ("loading", 0), ("dead", 0), ("failed", 0)]
)
def test_an_engine_that_answers_is_up(state: Any, up: int) -> None:
    metrics, engine = Metrics("demo"), Engine()
    assert ("chorale:engine_up", ENGINE_0) not in samples(metrics)  # nothing is known
    metrics.watch(engine)  # type: ignore[arg-type]
    engine.status = EngineStatus(state)
    assert samples(metrics)["chorale:engine_up", ENGINE_0] == up
    engine.status = LEFT  # no alert for a replica that a fleet has removed
    assert ("chorale:engine_up", ENGINE_0) not in samples(metrics)


def test_draft_metrics_exist_only_with_speculative_decoding() -> None:
    metrics, engine = watched()
    assert not any("spec_decode" in name for name, _ in samples(metrics))
    engine.info = msgspec.structs.replace(engine.info, num_speculative_tokens=3)
    position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert value(metrics, position, position="2") == 0  # every position is shown from the start
    how = "ngram, up to 3 draft tokens"
    engine.info = msgspec.structs.replace(engine.info, speculation=how)
    assert value(metrics, "chorale:speculation_info", drafts=how, synthetic="false") == 1
    counts = {"num_drafts": 10, "num_draft_tokens": 28, "num_accepted_tokens": 13}
    engine.stats = EngineStats(**counts, accepted_per_position=(8, 5), num_steps=12)
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 10
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 28
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 13
    engine.stats = EngineStats(**counts, accepted_per_position=(6, 4, 3), num_steps=2)  # after a restart
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 26
    assert [value(metrics, position, position=each) for each in "012"] == [14, 9, 3]


def test_host_memory_metrics_exist_only_with_a_host_tier() -> None:
    metrics, engine = watched()
    assert not any("offload" in name or "external_prefix" in name for name, _ in samples(metrics))
    engine.info = msgspec.structs.replace(engine.info, num_host_pages=40)
    counts = {"host_cache_queries": 90, "host_cache_hits": 64, "num_host_loads": 2, "host_load_seconds": 0.5}
    sizes = {"host_bytes_saved": 1000, "host_bytes_loaded": 400, "host_pages_dropped": 3}
    prompts = {"prompt_tokens": 100, "cached_prompt_tokens": 80, "host_prompt_tokens": 64}
    engine.stats = EngineStats(
        **counts, **sizes, **prompts, host_pages_used=10, host_pages_total=40, num_steps=9
    )
    assert value(metrics, "vllm:external_prefix_cache_queries_total") == 90
    assert value(metrics, "vllm:external_prefix_cache_hits_total") == 64
    assert value(metrics, "vllm:kv_offload_store_bytes_total") == 1000
    assert value(metrics, "vllm:kv_offload_load_bytes_total") == 400
    assert value(metrics, "vllm:kv_offload_load_time_total") == 0.5
    assert value(metrics, "vllm:kv_offload_stores_skipped_total") == 3
    assert value(metrics, "vllm:kv_offload_cpu_cache_usage_perc") == 0.25
    assert value(metrics, "chorale:host_kv_loads_total") == 2
    assert value(metrics, "chorale:host_kv_pages", kind="used") == 10
    assert value(metrics, "chorale:host_kv_pages", kind="total") == 40
    source = "vllm:prompt_tokens_by_source_total"
    assert value(metrics, source, source="local_cache_hit") == 16
    assert value(metrics, source, source="external_kv_transfer") == 64
    engine.stats = EngineStats(host_load_seconds=0.25, num_steps=1)  # after a restart
    assert value(metrics, "vllm:kv_offload_load_time_total") == 0.75


async def test_tokens_of_one_step_share_its_time() -> None:
    metrics = Metrics("demo")
    script = scripted([*range(1, 9), 200002], tokens_per_step=3, delay=0.05)
    await drain(MeteredClient(script, metrics), request())
    # Without the three tokens of the first step.
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 6
    assert 0.1 <= value(metrics, "vllm:inter_token_latency_seconds_sum") < 1
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.01") == 0


def test_counts_of_all_processes_are_summed(tmp_path: Path) -> None:
    every = [Metrics("demo", process=index, share=tmp_path) for index in range(3)]
    for index, metrics in enumerate(every):
        metrics.http_finished("/v1/models", "GET", 200, 0.01 * index)
        metrics.repaired({"cut_header": index})
        metrics.save()
    for metrics in every:
        labels = {"handler": "/v1/models", "method": "GET"}
        assert value(metrics, "http_requests_total", status="2xx", **labels) == 3
        assert value(metrics, "http_request_duration_seconds_count", **labels) == 3
        assert value(metrics, "chorale:harmony_repairs_total", kind="cut_header") == 3
    (tmp_path / "metrics-1.msgpack").write_bytes(b"half")
    assert value(every[0], "http_requests_total", status="2xx", **labels) == 2


def test_buckets_are_cumulative_and_include_their_upper_bound() -> None:
    histogram = Histogram.empty((1.0, 2.0))
    for observed in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(observed)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]


# Metrics of vLLM that a server has only with an option.
OPTIONAL = tuple(
    f"vllm:{name}_" for name in ("external_prefix", "kv_block", "kv_offload", "spec_decode", "lora")
)
OTHERS = """
process_resident_memory_bytes process_cpu_seconds_total process_open_fds process_start_time_seconds
python_info python_gc_collections_total http_request_duration_highr_seconds_bucket http_requests_total
"""


async def test_metrics_that_dashboards_read_exist() -> None:
    async with served(listens=True) as server:
        await call(server.port, "GET", "/v1/models/none%0a")
        answer = await call(server.port, "GET", "/metrics")
        text = answer.body.decode()
    names = {line.name for line in read_names("metric") if line.treatment == "acts"}
    assert len(names) > 50
    for name in names:
        assert f"# TYPE {name}" in text or name.startswith(OPTIONAL), name
    for name in OTHERS.split():
        assert f"\n{name}" in text, name
    assert 'http_requests_total{handler="/v1/models/{model:path}",method="GET",status="4xx"} 1.0' in text


def test_counting_a_token_is_cheap() -> None:
    """The budget is 1 us of CPU per token. The limit is 5 us because other processes share the caches."""
    metrics = Metrics("demo")
    client: Any = scripted()

    async def main() -> float:
        stream = MeteredClient(client, metrics).submit(request())
        chunk, record = TokenChunk("r", 0, [1]), stream._begin()  # type: ignore[attr-defined]
        best = float("inf")
        for _ in range(5):
            began = time.thread_time()
            for _ in range(10_000):
                stream._observe(chunk, 1.0, record)  # type: ignore[attr-defined]
            best = min(best, (time.thread_time() - began) / 10_000)
        await stream.aclose()
        return best

    assert asyncio.run(main()) < 5e-6


def test_engine_metrics_have_their_labels() -> None:
    metrics, engine = watched()
    engine.info = info(dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    engine.stats = EngineStats(
        num_waiting=7,
        num_deferred=3,
        prompt_tokens=100,
        cached_prompt_tokens=32,
        recomputed_prompt_tokens=16,
        num_corrupted=2,
        num_steps=4,
    )
    waiting = "vllm:num_requests_waiting_by_reason"
    assert value(metrics, waiting, reason="capacity") == 4
    assert value(metrics, waiting, reason="deferred") == 3
    source = "vllm:prompt_tokens_by_source_total"
    assert value(metrics, source, source="local_compute") == 68
    assert value(metrics, source, source="local_cache_hit") == 48
    assert value(metrics, source, source="external_kv_transfer") == 0
    assert value(metrics, "vllm:prompt_tokens_recomputed_total") == 16
    assert value(metrics, "vllm:corrupted_requests_total") == 2
    states = {state: value(metrics, "vllm:engine_sleep_state", sleep_state=state) for state in SLEEP_STATES}
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert 'cache_dtype="fp8_e4m3"' in metrics.render().decode()
    engine.stats = EngineStats(prompt_tokens=10, cached_prompt_tokens=5, num_steps=1)  # another process
    assert value(metrics, source, source="local_compute") == 73
    assert value(metrics, source, source="local_cache_hit") == 53


async def test_computed_prompt_tokens_are_observed_once_per_request() -> None:
    metrics = Metrics("demo")
    client = MeteredClient(scripted([1, 2, 200002], num_cached_tokens=16), metrics)
    await drain(client, request(n=2, prompt=40))
    await drain(MeteredClient(scripted([200002]), metrics), request(prompt=9))
    name = "vllm:request_prefill_kv_computed_tokens"
    assert value(metrics, f"{name}_count") == 2  # requests, not choices
    assert value(metrics, f"{name}_sum") == 24 + 9


def test_process_metrics_cover_the_server_and_the_engine(tmp_path: Path) -> None:
    metrics, engine = watched()
    shown = samples(metrics)
    assert shown["process_resident_memory_bytes", ()] > 2**20
    assert ("chorale:engine_process_resident_memory_bytes", ()) not in shown
    engine.info = info(pid=os.getpid())
    assert samples(metrics)["chorale:engine_process_resident_memory_bytes", ()] > 2**20
    # With several API processes, scrapes reach different ones, so process metrics would jump.
    several = Metrics("demo", process=1, share=tmp_path)
    several.watch(engine)  # type: ignore[arg-type]
    names = {name for name, _ in samples(several)}
    assert "process_resident_memory_bytes" not in names
    assert "python_info" not in names
    assert "chorale:engine_process_cpu_seconds_total" in names


def test_disabled_statistics_leave_out_the_vllm_metrics() -> None:
    metrics = Metrics("demo", log_stats=False)
    metrics.http_finished("/v1/models", "GET", 200, 0.01)
    text = metrics.render().decode()
    assert "vllm:" not in text
    assert "http_request_duration_highr_seconds_count 1.0" in text


def test_engine_metrics_have_a_series_per_engine_and_server_metrics_one(tmp_path: Path) -> None:
    processes = [Metrics("demo", process=index, share=tmp_path) for index in range(2)]
    replicas = Engine()
    replicas.engines = (Engine(), Engine())
    for number, engine in enumerate(replicas.engines):
        engine.stats = EngineStats(num_running=number + 1, generation_tokens=10 * number, num_steps=5)
        engine.info = info(engine_id=f"e{number}", num_blocks=100, pid=os.getpid())
    for metrics in processes:
        metrics.watch(replicas)  # type: ignore[arg-type]
        metrics.engines[1].series.count("vllm:request_success", ("stop",), 3)
        metrics.repaired({"cut_header": 1})
        metrics.save()
    shown, demo = samples(processes[0]), ("model_name", "demo")
    text = processes[0].render().decode()
    for name in ("vllm:num_requests_running", "vllm:request_success_total", "vllm:cache_config_info"):
        assert text.count(f"# TYPE {name.removesuffix('_total')}") <= 1
        assert len([line for line in text.splitlines() if line.startswith("# TYPE " + name)]) == 1
    for number in range(2):
        engine_label = ("engine", str(number))
        assert shown["vllm:num_requests_running", (engine_label, demo)] == number + 1
        assert shown["vllm:generation_tokens_total", (engine_label, demo)] == 10 * number
        assert shown["chorale:engine_restarts_total", (engine_label, demo)] == 0
        assert shown["chorale:engine_process_resident_memory_bytes", (engine_label,)] > 2**20
    stop = ("finished_reason", "stop")
    assert shown["vllm:request_success_total", (("engine", "1"), stop, demo)] == 6  # of both processes
    assert ("vllm:request_success_total", (("engine", "0"), stop, demo)) not in shown
    repairs = [labels for name, labels in shown if name == "chorale:harmony_repairs_total"]
    assert repairs == [(("engine", "0"), ("kind", "cut_header"), demo)]
    replicas.engines[1].info = info(engine_id="new")
    replicas.engines[1].stats = EngineStats(generation_tokens=1, num_steps=1)
    replicas.engines[1].status = EngineStatus("ready", restarts=1)
    processes[1].save()  # called once a second, even without scrapes
    shown = samples(processes[1])
    assert shown["chorale:engine_restarts_total", (("engine", "1"), demo)] == 1
    assert shown["vllm:generation_tokens_total", (("engine", "1"), demo)] == 11
    assert shown["chorale:engine_restarts_total", (("engine", "0"), demo)] == 0


def test_ranks_have_memory_and_exchange_metrics() -> None:
    metrics, engine = watched()
    assert not [name for name, _ in samples(metrics) if name.startswith("chorale:rank_")]  # with one rank
    engine.info = msgspec.structs.replace(
        engine.info,
        tensor_parallel_size=2,
        exchange="nccl",
        rank_bytes={"weights": (7, 6), "kv_cache": (9, 9)},
        rank_links="NVLink (NV18)",
        rank_free_bytes=(140, 60),
    )
    memory = [
        value(metrics, "chorale:rank_memory_bytes", kind=kind, rank=rank)
        for kind in ("weights", "kv_cache")
        for rank in "01"
    ]
    assert memory == [7, 6, 9, 9]
    facts = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "float32", "ops": "reference"}
    assert value(metrics, "chorale:engine_info", **facts, tensor_parallel_size="2") == 1
    assert [value(metrics, "chorale:rank_free_memory_bytes", rank=rank) for rank in "01"] == [140, 60]
    assert value(metrics, "chorale:rank_exchange_info", exchange="nccl", links="NVLink (NV18)") == 1


def test_the_operator_sets_the_buckets_of_a_family() -> None:
    own = {"request_latency": [0.5, 8], "request_num_preemptions": [3]}
    assert merge(["--custom-histogram-buckets", json.dumps(own)], {}).server.histogram_buckets == own
    metrics = Metrics("demo", buckets=own)
    lines = metrics.render().decode().splitlines()

    def bounds(name: str) -> list[str]:
        return [line.split('le="')[1].split('"')[0] for line in lines if line.startswith(f"{name}_bucket")]

    assert bounds("vllm:e2e_request_latency_seconds") == ["0.5", "8.0", "+Inf"]
    assert bounds("vllm:request_queue_time_seconds") == ["0.5", "8.0", "+Inf"]
    assert bounds("vllm:request_num_preemptions") == ["3.0", "+Inf"]
    assert len(bounds("vllm:time_to_first_token_seconds")) == 23


@pytest.mark.parametrize("bounds", [[], [2, 1], [1, 1], [0, 1], [True], ["1"], [1e999], 1, [1] * 101])
def test_bounds_that_prometheus_cannot_use_stop_the_start(bounds: Any) -> None:
    given = {"request_tokens": bounds}
    with pytest.raises(ConfigError, match="--custom-histogram-buckets: request_tokens"):
        merge(["--custom-histogram-buckets", json.dumps(given)], {})
    for unknown in ("latency", "kv_cache_residency"):  # the engine's histograms have fixed buckets
        with pytest.raises(ConfigError, match="names of request_latency"):
            merge(["--custom-histogram-buckets", json.dumps({unknown: [1]})], {})


def become(engine: Engine, engine_id: str, steps: int) -> None:
    engine.info = info(engine_id=engine_id)
    engine.stats = EngineStats(num_steps=steps, generation_tokens=10 * steps)
    engine.status = EngineStatus("ready", restarts=int(engine_id == "b"))


@pytest.mark.parametrize("scraped", [False, True])
@pytest.mark.parametrize(("steps", "counted"), [(3, 8), (5, 10), (40, 45)])
def test_counters_of_a_restarted_engine_are_added_whether_lower_or_higher(
    steps: int, counted: int, scraped: bool
) -> None:
    engine, record = Engine(), EngineRecord({"model_name": "m", "engine": "0"})
    record.watch(engine)  # type: ignore[arg-type]
    record.current_stats()
    become(engine, "a", 5)
    record.current_stats()
    if scraped:  # while the new engine starts
        engine.stats = EngineStats()
        record.current_stats()
        become(engine, "b", 2)
        record.observe(engine.stats)  # by a request, before the new id is seen
    become(engine, "b", steps)
    for _ in range(2):
        assert record.totals(record.current_stats()).num_steps == counted
        assert record.totals(record.current_stats()).generation_tokens == 10 * counted
    assert record.num_restarts == 1


async def test_the_metric_follows_the_store(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite3"
    async with served(store=SqliteStore(str(path), lock_seconds=0.2)) as server:
        http = server.http

        async def up() -> str:
            lines = (await http.get("/metrics")).text.splitlines()
            return next(line for line in lines if line.startswith("chorale:response_store_up"))[-3:]

        assert await up() == "1.0"
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert (await http.post("/v1/conversations", json={})).status_code == 503
        assert await up() == "0.0"
        other.close()
        assert (await http.post("/v1/conversations", json={})).status_code == 200
        assert await up() == "1.0"
