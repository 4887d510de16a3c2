"""``--watchdog-config``: vLLM's watchdog of a process, which here is the monitor of the engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.config.options.flags import FLAGS
from chorale.config.options.values import Setting, check_bounds
from chorale.errors import ConfigError

_UNUSED = {
    "check_interval": "heartbeats are read ten times a second",
    "dump_dir": "the stacks of an engine that hangs are written to the server's log",
}


def watchdog_fields(values: Mapping[str, Setting]) -> dict[str, float]:
    """Returns the heartbeat timeout, if the option sets it. Raises ``ConfigError``."""
    timeout = _read(values).get("timeout")
    if timeout is None:
        return {}
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise ConfigError(f"--watchdog-config: timeout: {timeout!r} is not a number of seconds")
    check_bounds(FLAGS["heartbeat-timeout"], timeout)
    if "heartbeat-timeout" in values:
        raise ConfigError("--watchdog-config: timeout and --heartbeat-timeout mean the same; give only one")
    return {"heartbeat_timeout": float(timeout)}


def watchdog_notices(values: Mapping[str, Setting]) -> list[str]:
    """Returns a line for each key without effect."""
    used = [key for key in _read(values) if key in _UNUSED]
    return [f"--watchdog-config: {key} is accepted and has no effect: {_UNUSED[key]}" for key in used]


def _read(values: Mapping[str, Setting]) -> dict[str, Any]:
    setting = values.get("watchdog-config")
    given = {} if setting is None or setting.value is None else setting.value
    if not isinstance(given, dict) or (unknown := given.keys() - {"timeout", *_UNUSED}):
        wrong = f"{min(unknown)!r} is" if isinstance(given, dict) else "it is"
        raise ConfigError(f"--watchdog-config: {wrong} not one of timeout, {', '.join(_UNUSED)}")
    return given
