"""``--kv-events-config``."""

from __future__ import annotations

from collections.abc import Mapping

from chorale.config.kv_events import KvEventsConfig, read_kv_events
from chorale.config.options.values import Setting

_FLAG = "--kv-events-config"


def kv_events_fields(values: Mapping[str, Setting], replicas: int) -> dict[str, KvEventsConfig]:
    """Returns the engine's field, if the option was given. Raises ``ConfigError``."""
    setting = values.get("kv-events-config")
    if setting is None or setting.value is None:
        return {}
    return {"kv_events_config": read_kv_events(setting.value, _FLAG, replicas)}


def kv_events_notice(values: Mapping[str, Setting]) -> list[str]:
    """Returns a line if the option was given and publishes nothing."""
    setting = values.get("kv-events-config")
    given = None if setting is None else setting.value
    if setting is None or not isinstance(given, Mapping) or not given:
        return []
    caching = values.get("enable-prefix-caching")
    reason = read_kv_events(given, _FLAG).why_silent(caching is None or caching.value is not False)
    return [f"{_FLAG} ({setting.origin}) publishes nothing: {reason}"] if reason else []
