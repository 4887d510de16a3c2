"""The rules of ``--data-parallel-size`` and the flags about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.cli.options.values import Setting
from chorale.errors import ConfigError

RAY = "Ray is not supported: engines are processes of this machine (mp)"


def replica_fields(values: Mapping[str, Setting]) -> dict[str, Any]:
    """Returns the server fields that follow from the number of replicas. Raises ``ConfigError``.

    As in vLLM, there are as many HTTP processes as engines unless ``--api-server-count`` is given: one of
    them writes the tokens of a few thousand streams, not those of eight GPUs.
    """
    size, local = _number(values, "data-parallel-size"), _number(values, "data-parallel-size-local")
    count = size if size is not None else local or 1
    if local is not None and local != count:
        raise ConfigError(
            f"--data-parallel-size-local {local}: all {count} engines run on this machine; leave it out"
        )
    backend = values.get("data-parallel-backend")
    if count > 1 and backend is not None and backend.value == "ray":
        raise ConfigError(f"--data-parallel-backend ray ({backend.origin}): {RAY}")
    fields: dict[str, Any] = {"data_parallel_size": count}
    if count > 1 and _number(values, "api-server-count") is None:
        fields["api_server_count"] = count
    return fields


def backend_notice(value: Any, shown: str) -> str | None:
    """Returns the line about ``--data-parallel-backend`` for one engine, where it decides nothing."""
    return f"{shown} is accepted and has no effect: {RAY}" if value == "ray" else None


def _number(values: Mapping[str, Setting], name: str) -> int | None:
    setting = values.get(name)
    return setting.value if setting is not None else None
