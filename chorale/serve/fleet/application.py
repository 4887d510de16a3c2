"""Builds the Ray Serve application, which has two deployments, from the options of ``chorale serve``."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chorale.config.engine import EngineConfig, ServerConfig, hash_key
from chorale.config.options.parse import read_mapping
from chorale.config.options.settings import Settings, merge_values
from chorale.config.options.values import Setting
from chorale.errors import ConfigError
from chorale.serve.bootstrap import ApiStart
from chorale.serve.fleet.version import import_serve
from chorale.serve.logs import LogOptions

if TYPE_CHECKING:
    from ray.serve import Application

ROUTER = "chorale.serve.fleet.router.PrefixRouter"
# Chorale itself limits requests, with status 429 and Retry-After. Ray's limit only has to be higher.
MOST_REQUESTS = 16384
DRAIN_SLACK = 10.0  # seconds added to --shutdown-timeout
RESOURCES = {"cuda": "GPU", "rocm": "GPU", "npu": "NPU"}  # Ray resource of each device kind


def application_of(args: Mapping[str, Any]) -> Application:
    """Builds the application from ``args`` of a ``serve.config``. Raises ``ConfigError``."""
    values = {name: Setting(value, "file") for name, value in read_mapping(args, "args").items()}
    values.setdefault("data-parallel-backend", Setting("ray", "file"))
    return application(merge_values(values, os.environ))


def application(settings: Settings) -> Application:
    """Builds the application. Raises ``ConfigError`` for options that Ray does not support."""
    serve = import_serve()
    from chorale.serve.fleet.engine import Engine
    from chorale.serve.fleet.front import Front

    engine, server = settings.engine, settings.server
    check_options(engine, server)
    fronts = server.api_server_count
    resources = resources_of(engine)
    name = (server.served_model_names or (engine.model,))[0]
    engines = serve.deployment(
        Engine,
        num_replicas=server.data_parallel_size,
        ray_actor_options=actor_options(resources),
        placement_group_bundles=[resources],
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=MOST_REQUESTS,
        graceful_shutdown_timeout_s=server.shutdown_timeout + DRAIN_SLACK,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        max_constructor_retry_count=3,
        request_router_config={"request_router_class": ROUTER},
        logging_config={"enable_access_log": False},  # it would log calls of ``hold``
    )
    front = serve.deployment(
        serve.ingress()(Front),
        name="Front",
        num_replicas=fronts,
        ray_actor_options={"num_cpus": 1},
        max_surge_percent=100,  # an update starts the new fronts before it stops the old ones
        max_ongoing_requests=MOST_REQUESTS,
        graceful_shutdown_timeout_s=server.shutdown_timeout + DRAIN_SLACK,
        graceful_shutdown_wait_loop_s=0.5,
    )
    start = api_start(engine, server, [hash_key(key) for key in settings.api_keys], fronts)
    made: Application = front.bind(engines.bind(engine, name, LogOptions.of(server)), start)
    return made


def api_start(
    engine: EngineConfig, server: ServerConfig, key_hashes: Sequence[bytes], fronts: int
) -> ApiStart:
    """Returns the configuration of a front, with its share of the limit on background responses."""
    share = max(1, server.max_background_responses // fronts)
    own = dataclasses.replace(server, api_server_count=1, max_background_responses=share)
    return ApiStart(
        directory="",
        server=own,
        model=engine.model,
        api_key_hashes=tuple(key_hashes),
        socket_fds=(),
        parent_pid=0,
        log=LogOptions.of(server),
    )


def check_options(engine: EngineConfig, server: ServerConfig) -> None:
    """Raises ``ConfigError`` for options of an HTTP server that Ray's proxies replace."""
    for field in ("uds", "ssl_keyfile", "ssl_certfile"):
        if getattr(server, field) is not None:
            raise ConfigError(
                f"--{field.replace('_', '-')} cannot be used with Ray, because Ray's proxies listen "
                "(http_options of serve.config)"
            )


def resources_of(engine: EngineConfig) -> dict[str, float]:
    """Returns the Ray resources of a replica: its accelerators, and a CPU for each rank.

    With ``device`` "auto", these include GPUs or NPUs if the cluster currently has any.
    """
    ranks = engine.tensor_parallel_size
    kind = RESOURCES.get(engine.device)
    if kind is None and engine.device == "auto":
        kind = next((each for each in ("GPU", "NPU") if cluster_has(each)), None)
    return {"CPU": float(ranks), kind: float(ranks)} if kind is not None else {"CPU": float(ranks)}


def cluster_has(kind: str) -> bool:
    import ray

    return bool(ray.is_initialized()) and math.floor(ray.cluster_resources().get(kind, 0)) > 0


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns the same resources as options of the replica's actor, which uses its whole bundle."""
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": resources["CPU"],
        "num_gpus": resources.get("GPU", 0),
        **({"resources": others} if others else {}),
    }
