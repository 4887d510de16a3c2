"""``--speculative-config``, and the flags that set one key of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.config.engine import EngineConfig
from chorale.config.options.values import Setting, wins
from chorale.config.read_speculative import read_speculative
from chorale.config.speculative import SpeculativeConfig
from chorale.errors import ConfigError

_FLAG = "--speculative-config"
_KEYS = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}


def check_served(config: EngineConfig, values: Mapping[str, Setting]) -> None:
    """Raises ``ConfigError`` for a server whose answers would be meaningless, unless that was allowed."""
    speculative = config.speculative_config
    allowed = values.get("allow-synthetic-acceptance")
    if speculative is not None and speculative.is_synthetic and not (allowed and allowed.value):
        raise ConfigError(
            f"{_FLAG}: with synthetic acceptance the output is meaningless; use it only with chorale bench "
            "latency and throughput, or add --allow-synthetic-acceptance to serve nevertheless"
        )


def read_speculation(values: Mapping[str, Setting]) -> tuple[SpeculativeConfig | None, tuple[str, ...]]:
    """Returns the config (None if drafts were not requested) and a notice for each key without effect.

    Raises ``ConfigError``.
    """
    setting = values.get("speculative-config")
    given = setting.value if setting is not None else None
    if given is not None and not isinstance(given, Mapping):
        return read_speculative(given, _FLAG)  # raises the error
    merged: dict[str, Any] = dict(given or {})
    for flag, key in _KEYS.items():
        own = values.get(flag)
        if own is None or own.value is None:
            continue
        if (
            setting is None
            or merged.get(key) in (None, own.value)
            or not wins(setting, own, f"{key} in {_FLAG}", f"--{flag}")
        ):
            merged[key] = own.value
    return read_speculative(merged, _FLAG) if merged or given is not None else (None, ())
