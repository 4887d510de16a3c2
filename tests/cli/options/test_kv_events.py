"""--kv-events-config: vLLM's JSON, from the command line, a file, the environment or ``LLM``."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from chorale.config.kv_events import KvEventsConfig, endpoint_of
from chorale.config.options.settings import Settings, merge
from chorale.config.read_objects import read_kv_events
from chorale.errors import ConfigError
from chorale.llm.configure import engine_config
from chorale.serve.bootstrap import configured_secret

ON: dict[str, Any] = {"enable_kv_cache_events": True}


def given(config: Any, *more: str) -> Settings:
    return merge(["demo", "--kv-events-config", json.dumps(config), *more], {})


def test_keys_and_defaults_are_vllms() -> None:
    config = given(ON).engine.kv_events_config
    assert config == KvEventsConfig(enable_kv_cache_events=True)
    assert config.is_on
    assert (config.publisher, config.endpoint, config.replay_endpoint) == ("zmq", "tcp://*:5557", None)
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert (config.topic, config.encoding, config.groups) == ("", "map", "full")
    assert merge(["demo"], {}).engine.kv_events_config is None


def test_the_config_can_come_from_a_variable_or_llm() -> None:
    """From a file and from single keys as every JSON option: see ``test_speculation``."""
    wanted = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:6000", topic="kv@x")
    config = {**ON, "endpoint": "tcp://*:6000", "topic": "kv@x"}
    environment = {"CHORALE_KV_EVENTS_CONFIG": json.dumps(config)}
    assert merge(["demo"], environment).engine.kv_events_config == wanted
    assert engine_config("demo", {"kv_events_config": config}, 1).kv_events_config == wanted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([1], "must be a JSON object"),
        ({"enable_kv_events": True}, "unknown key 'enable_kv_events'; did you mean enable_kv_cache_events?"),
        ({**ON, "publisher": "kafka"}, "publisher: Invalid enum value 'kafka'; one of zmq, null"),
        ({**ON, "encoding": "json"}, "encoding: Invalid enum value 'json'; one of map, array"),
        ({**ON, "groups": "window"}, "groups: Invalid enum value 'window'; one of full, all"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events: Expected `bool`, got `str`"),
        ({**ON, "hwm": 0}, "hwm: Expected `int` >= 1"),
        ({**ON, "buffer_steps": "many"}, "buffer_steps: Expected `int`, got `str`"),
        ({**ON, "topic": 7}, "topic: Expected `str`, got `int`"),
        ({**ON, "endpoint": "inproc://x"}, "endpoint 'inproc://x': must be tcp://HOST:PORT"),
        ({**ON, "endpoint": "tcp://*"}, "must be tcp://HOST:PORT"),
        ({**ON, "endpoint": "tcp://*:70000"}, "port 70000 is not in the range 1 to 65535"),
        ({**ON, "endpoint": "ipc://" + "x" * 101}, "a path of at most 100 bytes"),
        (
            {**ON, "replay_endpoint": "tcp://*:5557"},
            "replay_endpoint tcp://*:5557 is already used by endpoint",
        ),
    ],
)
def test_invalid_configs_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given(config)
    assert message in str(caught.value)
    assert str(caught.value).startswith("--kv-events-config")


def test_ports_of_replicas_do_not_overlap() -> None:
    config = {**ON, "replay_endpoint": "tcp://*:5559"}
    assert given(config, "-dp", "2").engine.kv_events_config is not None
    with pytest.raises(
        ConfigError, match=r"replay_endpoint tcp://\*:5559 of replica 0 is already used by endp"
    ):
        given(config, "-dp", "4")
    with pytest.raises(ConfigError, match="port 65536"):
        given({**ON, "endpoint": "tcp://*:65535"}, "-dp", "2")
    assert read_kv_events({**ON, "endpoint": "tcp://epp:5557", "bind": False}, "x", 2).bind is False


@pytest.mark.parametrize(
    ("endpoint", "own"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::]:5557", "tcp://[::]:5559"),
        ("tcp://:::5557", "tcp://[::]:5559"),
        ("tcp://epp.svc:5557", "tcp://epp.svc:5559"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv_dp2"),
    ],
)
def test_each_replica_has_its_own_address(endpoint: str, own: str) -> None:
    assert endpoint_of(endpoint, 2) == own


def test_a_config_that_publishes_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for config, more, reason in (
        ({}, (), ""),
        ({"topic": "x"}, (), "enable_kv_cache_events is not true"),
        ({**ON, "publisher": "null"}, (), 'the publisher is "null"'),
        (ON, ("--no-enable-prefix-caching",), "prefix caching is off"),
        (ON, (), ""),
    ):
        notices = [line for line in given(config, *more).notices if "publishes nothing" in line]
        assert len(notices) == bool(reason)
        assert all(line.endswith(reason) for line in notices)
    with caplog.at_level(logging.WARNING):
        engine_config("demo", {"kv_events_config": {"topic": "x"}}, 1)
    assert "publishes nothing: enable_kv_cache_events is not true" in caplog.text
    with pytest.raises(ConfigError, match="LLM: kv_events_config: unknown key"):
        engine_config("demo", {"kv_events_config": {"x": 1}}, 1)


def test_hashes_are_random_unless_a_seed_is_set() -> None:
    off, on = merge(["demo"], {}).engine, given(ON).engine
    null = given({**ON, "publisher": "null"}).engine
    assert configured_secret(off, {"PYTHONHASHSEED": "0"}) == b"" == configured_secret(null, {})
    assert configured_secret(on, {}) == configured_secret(on, {"OTHER": "x"}) != b""
    seeded = configured_secret(on, {"PYTHONHASHSEED": "0"})
    assert seeded != configured_secret(on, {})
    assert configured_secret(off, {"CHORALE_PREFIX_SECRET": "x"}) == configured_secret(
        on, {"CHORALE_PREFIX_SECRET": "x", "PYTHONHASHSEED": "0"}
    )
