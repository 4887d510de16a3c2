"""Flags, environment and YAML become two frozen configurations, with vLLM's names and precedence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chorale.cli.commands.serve.config import render
from chorale.config.engine import EngineConfig, ServerConfig, ToolConfig, hash_key, owner_name
from chorale.config.options.flags import FLAGS
from chorale.config.options.settings import Setting, merge
from chorale.config.options.values import parse_size
from chorale.errors import ConfigError

# Public recipes, in the form of the published files.
RECIPES = {
    "blackwell": """
kv-cache-dtype: fp8
no-enable-prefix-caching: true
max-cudagraph-capture-size: 2048
max-num-batched-tokens: 8192
stream-interval: 20
""",
    "eagle3": """
no-enable-prefix-caching: true
speculative-config:
  model: nvidia/gpt-oss-120b-Eagle3-v2
  method: eagle3
  num_speculative_tokens: 3
  draft_tensor_parallel_size: 1
stream-interval: 20
""",
    "old": """
async-scheduling: true
compilation-config:
  pass_config:
    enable_fi_allreduce_fusion: true
cuda-graph-sizes: 2048
max-model-len: 10240
max-num-batched-tokens: 8192
no-enable-prefix-caching: true
""",
}


def test_every_target_is_a_field() -> None:
    sections = {"engine": EngineConfig, "server": ServerConfig, "tools": ToolConfig}
    for flag in FLAGS.values():
        if flag.target is None:
            assert flag.note, f"{flag.name} is accepted without a reason"
            continue
        section, _, attribute = flag.target.partition(".")
        if section != "cli":
            assert attribute in {f.name for f in dataclasses.fields(sections[section])}, flag.target


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.yaml"
    path.write_text(RECIPES[name])
    settings = merge(["openai/gpt-oss-120b", "--config", str(path)], {})
    assert settings.engine.model == "openai/gpt-oss-120b"
    assert settings.engine.enable_prefix_caching is False
    if name != "old":
        assert settings.server.stream_interval == 20
    else:
        assert settings.engine.max_model_len == 10240
        assert settings.engine.async_scheduling is True


def test_precedence_is_command_line_environment_file_default(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("port: 9001\nsystem_start_date: '2025-01-01'\nmax-num-seqs: 7\n")
    environment = {"VLLM_SYSTEM_START_DATE": "2025-02-02"}
    settings = merge(["--config", str(path), "--port=9002"], environment)
    assert settings.server.port == 9002
    assert settings.server.system_start_date == "2025-02-02"
    assert settings.engine.max_num_seqs == 7
    assert settings.values["port"].origin == "command line"
    assert settings.values["system-start-date"].origin == "environment"
    assert settings.values["max-num-seqs"].origin == "file"
    assert "port                " in render(settings)


@pytest.mark.parametrize(
    ("text", "value"),
    [("8192", 8192), ("10k", 10_000), ("10K", 10_240), ("1.5k", 1500), ("-1", None), ("auto", None),
     ("16GiB", 16 * 2**30), ("2M", 2 * 2**20)],
)  # fmt: skip
def test_sizes_are_parsed(text: str, value: int | None) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "ten", "-5", "1.5", "0x10", "10 q"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (number|non-negative integer)"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port"], "--port needs a value"),
        (["--port", "eighty"], "--port: 'eighty' is not an integer"),
        (["--gpu-memory-utilization", "90%"], "--gpu-memory-utilization: '90%' is not a number"),
        (["--scheduling-policy", "lifo"], "fcfs"),
        (["a", "b"], "only one model can be given"),
        (["a", "--model", "b"], "only one model can be given, not both 'a' and --model 'b'"),
        (["--config", "none.toml"], ".yaml"),
        (["--config", "none.yaml"], "No such file"),
        (["--ssl-keyfile", "k"], "--ssl-certfile"),
        (["--seed", "1" + 20 * "0"], "--seed 100000000000000000000: is too large"),
        (["--allowed-origins", "5"], "--allowed-origins: must be a list"),
        (["--system-start-date", "20250101"], "must be a date, YYYY-MM-DD"),
        (["--system-start-date", "2025-02-30"], "must be a date, YYYY-MM-DD"),
        (["demo", "--revision", "main"], "--revision main: the demo model ships inside the package"),
        (["--scheduling-policy", "prioriti"], "did you mean priority?"),
        (["-z"], "unknown option -z"),
    ],
)
def test_errors_name_the_mistake(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        merge(arguments, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--port: 1\n", "c.yaml: unknown key --port; did you mean port?"),
        ("max-num-sequences: 3\n", "c.yaml: unknown key max-num-sequences; did you mean max-num-seqs"),
        ("port: 1.5\n", "c.yaml: port: '1.5' is not an integer"),
        ("max-model-len: max-num: 3\n", "not valid YAML"),
        ("port: " + "[" * 20_000, "c.yaml: is nested too deeply"),
        ("port: 1\nport: 2\n", "port is set twice"),
        ("stream-interval: 0\n", "--stream-interval must be at least 1"),
    ],
)
def test_a_mistake_in_the_file_gives_one_line_with_its_spelling(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        merge(["--config", str(path)], {})
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_key_of_the_file_without_a_value_is_not_set(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("".join(f"{name}:\n" for name in FLAGS if name != "config"))
    assert merge(["--config", str(path)], {}) == dataclasses.replace(
        merge([], {}), values={"config": Setting(str(path), "command line")}
    )
    path.write_text("no-enable-prefix-caching:\n")
    assert merge(["--config", str(path)], {}).values.keys() == {"config"}


def test_a_single_string_is_a_list_of_one() -> None:
    server = merge(["--allowed-origins", '"https://a"', "--allowed-methods", '["GET"]'], {}).server
    assert (server.allowed_origins, server.allowed_methods) == (("https://a",), ("GET",))


def test_keys_come_from_flag_file_or_environment_and_are_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nsecret-one\n\nsecret-two\n")
    settings = merge(["--api-key-file", str(path)], {})
    assert settings.api_keys == ("secret-one", "secret-two")
    assert "secret" not in render(settings)
    assert merge([], {"VLLM_API_KEY": "secret"}).api_keys == ("secret",)
    assert merge([], {"CHORALE_API_KEY": "", "VLLM_API_KEY": "secret"}).api_keys == ("secret",)
    both = {"VLLM_API_KEY": "theirs", "CHORALE_API_KEY": "ours"}
    assert merge([], both).api_keys == ("ours",)
    assert merge(["--api-key", "a", "b"], {"VLLM_API_KEY": "secret"}).api_keys == ("a", "b")
    assert merge(["--api-key", "a", "--api-key=b", "--port", "1"], {}).api_keys == ("a", "b")


@pytest.mark.parametrize(("option", "browser"), [("pages", "offline"), ("url", "searxng")])
def test_the_address_of_a_search_selects_its_service(option: str, browser: str) -> None:
    given = [f"--browser-tool-{option}", "http://search"]
    assert merge(given, {}).server.tools.browser == browser
    assert merge([*given, "--browser-tool", "none"], {}).server.tools.browser == "none"


def test_a_key_of_the_file_may_have_a_weight(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("plain\nheavy weight=2.5\nwith space weight=0.5\n")
    settings = merge(["--api-key-file", str(path)], {})
    assert settings.api_keys == ("plain", "heavy", "with space")
    heavy, light = (owner_name(hash_key(key)) for key in ("heavy", "with space"))
    assert settings.server.key_weights == {heavy: 2.5, light: 0.5}
    for wrong in ("0", "-1", "nan", "1e3", "101", ""):
        path.write_text(f"key weight={wrong}\n")
        with pytest.raises(ConfigError, match="weight"):
            merge(["--api-key-file", str(path)], {})


def test_keys_are_stripped_and_never_empty(tmp_path: Path) -> None:
    assert merge([], {"CHORALE_API_KEY": "secret\n"}).api_keys == ("secret",)
    assert merge(["--api-key", " a ", "b"], {}).api_keys == ("a", "b")
    for none in ("", " \n"):
        with pytest.raises(ConfigError, match="empty"):
            merge(["--api-key", "a", none], {})
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        merge(["--api-key-file", str(tmp_path / "keys")], {})


@pytest.mark.parametrize("name", ["api-key", "served-model-name", "tool-server"])
@pytest.mark.parametrize("items", ["[a, null]", "{a: b}", "[[a]]", "true", "[a, {b: c}]"])
def test_values_in_a_file_that_are_not_strings_are_refused(name: str, items: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{name}: {items}\n")
    with pytest.raises(ConfigError, match=rf"{name}: value \d is not a string$"):
        merge(["--config", str(path)], {})
    path.write_text(f"{name}: [a, 1]\n")
    assert merge(["--config", str(path)], {}).values[name].value == ("a", "1")


def test_lists_of_values_end_at_the_next_option() -> None:
    settings = merge(["demo", "--served-model-name", "a", "b", "--port", "1"], {})
    assert settings.server.served_model_names == ("a", "b")
    assert settings.engine.model == "demo"


@pytest.mark.parametrize(
    ("line", "engines", "http"),
    [
        ([], 1, 1),
        (["-dp", "4"], 4, 4),  # as many HTTP processes as engines, as in vLLM
        (["--data-parallel-size", "4", "--api-server-count", "1"], 4, 1),
        (["-dpl", "2"], 2, 2),
        (["--api-server-count", "3"], 1, 3),
    ],
)
def test_each_replica_adds_an_http_process(line: list[str], engines: int, http: int) -> None:
    server = merge(line, {}).server
    assert server.data_parallel_size == engines
    assert server.api_server_count == http


@pytest.mark.parametrize(
    ("given", "most", "sizes"),
    [(["2048"], 2048, None), (["1", "2", "4"], None, (1, 2, 4)), (["1,2"], None, (1, 2))],
)
def test_a_single_cuda_graph_size_is_the_largest(
    given: list[str], most: int | None, sizes: tuple[int, ...] | None
) -> None:
    settings = merge(["--cuda-graph-sizes", *given], {})
    assert settings.engine.max_cudagraph_capture_size == most
    assert settings.engine.cudagraph_capture_sizes == sizes
    assert len(settings.notices) == (most is not None)


def test_a_context_too_short_for_a_chat_is_noted() -> None:
    assert len(merge(["--max-model-len", "10"], {}).notices) == 1
    assert not merge(["--max-model-len", "256"], {}).notices


def test_an_error_names_the_flag_as_it_was_written() -> None:
    for name in ("--log-level", "--uvicorn-log-level"):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            merge([name, "verbose"], {})


# --------------------------------------------------------------------------- vLLM 0.33's engine flags


def test_flags_of_queue_scheduler_and_devices_set_their_fields() -> None:
    line = (
        "--max-num-active-seqs 4 --max-num-scheduled-tokens 1k --prefill-schedule-interval 2 --watermark 0.1 "
        "--long-prefill-token-threshold 64 --long-prefill-token-threshold-adaptive --device-ids 2,GPU "
        "--distributed-timeout-seconds 30 --logprobs-mode raw_logits --max-num-queued-reqs 9 "
        "--max-num-queued-tokens 10k --kv-cache-metrics --kv-cache-metrics-sample 0.5"
    )
    with pytest.raises(ConfigError, match="--device-ids 2,GPU"):
        merge(line.split(), {})
    found = merge([*line.split(), "--device-ids", "2, 3", "--scheduler-reserve-full-isl"], {})
    engine, server = found.engine, found.server
    assert (engine.max_num_active_seqs, engine.max_num_scheduled_tokens) == (4, 1000)
    assert (engine.prefill_schedule_interval, engine.watermark) == (2, 0.1)
    assert engine.long_prefill_token_threshold == 64
    assert engine.long_prefill_token_threshold_adaptive
    assert (engine.device_ids, engine.distributed_timeout_seconds) == (("2", "3"), 30)
    assert (engine.logprobs_mode, engine.kv_cache_metrics_sample) == ("raw_logits", 0.5)
    assert (server.max_num_queued_reqs, server.max_num_queued_tokens) == (9, 10_000)
    assert [notice.split(" ")[0] for notice in found.notices] == ["--scheduler-reserve-full-isl"]


def test_the_watchdog_of_vllm_sets_the_heartbeat_timeout() -> None:
    found = merge(["--watchdog-config", '{"timeout": 90, "check_interval": 5, "dump_dir": "/x"}'], {})
    assert found.engine.heartbeat_timeout == 90.0
    assert ["only timeout" in notice for notice in found.notices] == [True]
    assert merge(["--watchdog-config.timeout", "8"], {}).engine.heartbeat_timeout == 8.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"time_out": 5}', "time_out"),
        ("[]", "timeout, check_interval, dump_dir"),
        ('{"timeout": "5"}', "timeout: '5'"),
        ('{"timeout": 0}', "between 0.5 and 3600"),
        ('{"timeout": 5} --heartbeat-timeout 5', "give only one"),
    ],
)
def test_a_wrong_watchdog_is_an_error(given: str, words: str) -> None:
    value, *others = given.split(" --")
    more = [part for other in others for part in f"--{other}".split()]
    with pytest.raises(ConfigError, match=words):
        merge(["--watchdog-config", value, *more], {})
