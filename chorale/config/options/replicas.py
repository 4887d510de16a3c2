"""The rules of ``--data-parallel-size`` and the flags about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.config.options.values import Setting
from chorale.errors import ConfigError


def replica_fields(values: Mapping[str, Setting]) -> dict[str, Any]:
    """Returns the server fields that follow from the number of replicas. Raises ``ConfigError``.

    As in vLLM, there are as many HTTP processes as engines unless ``--api-server-count`` is given: one of
    them writes the tokens of a few thousand streams, not those of eight GPUs.
    """
    size, local = _number(values, "data-parallel-size"), _number(values, "data-parallel-size-local")
    count = size if size is not None else local or 1
    backend = values.get("data-parallel-backend")
    on_ray = backend is not None and backend.value == "ray"
    if local is not None and local != count and on_ray:
        raise ConfigError(f"--data-parallel-size-local {local}: Ray places the engines; leave it out")
    if local is not None and local != count:
        raise ConfigError(
            f"--data-parallel-size-local {local}: all {count} engines run on this machine; leave it out"
        )
    fields: dict[str, Any] = {"data_parallel_size": count}
    if count > 1 and not on_ray and _number(values, "api-server-count") is None:
        fields["api_server_count"] = count
    return fields


def _number(values: Mapping[str, Setting], name: str) -> int | None:
    setting = values.get(name)
    return setting.value if setting is not None else None
