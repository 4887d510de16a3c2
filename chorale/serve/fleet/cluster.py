"""Connects to the Ray cluster on which ``chorale serve`` runs, and checks that it has enough GPUs."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from chorale.errors import ConfigError
from chorale.serve.fleet.version import import_serve

START = "start one with 'ray start --head', or name one in RAY_ADDRESS"


def connect() -> None:
    """Connects to the cluster at ``RAY_ADDRESS`` or on this machine. Raises ``ConfigError``."""
    import_serve()
    import ray

    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True
        )
    except ConnectionError:
        where = "on this machine" if address == "auto" else f"at RAY_ADDRESS={address}"
        raise ConfigError(f"--data-parallel-backend ray: there is no Ray cluster {where}: {START}") from None
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"--data-parallel-backend ray: {str(error).splitlines()[0]}") from error


def nodes() -> list[Mapping[str, Any]]:
    """Returns the live nodes of the cluster."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def check_room(resources: Mapping[str, float], count: int, found: Sequence[Mapping[str, Any]]) -> None:
    """Raises ``ConfigError`` if the nodes have too few resources for ``count`` engines."""
    kind = next((name for name in resources if name != "CPU"), "CPU")
    each = resources[kind]
    have = [math.floor(node["Resources"].get(kind, 0)) for node in found]
    room = sum(math.floor(amount / each) for amount in have)
    if room >= count:
        return
    unit = "CPUs" if kind == "CPU" else f"{kind}s"
    listed = ", ".join(
        f"{node['NodeManagerAddress']} {amount}" for node, amount in zip(found, have, strict=True)
    )
    group = f", {each:g} per engine on one node" if each > 1 else ""
    remedy = (
        f"use --data-parallel-size {room}" if room else "use a smaller --tensor-parallel-size, or add nodes"
    )
    what = "1 engine needs" if count == 1 else f"{count} engines need"
    raise ConfigError(
        f"--data-parallel-size {count}: {what} {count * each:g} {unit}{group}; the cluster has "
        f"{sum(have)} ({listed}): {remedy}"
    )
