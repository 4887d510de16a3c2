"""Builds the frozen configs of ``chorale/config`` from flag values, and checks rules that span several flags.

Raises ``ConfigError`` for combinations that are invalid on every machine and with every model.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chorale.config.cache_dtype import cache_dtype
from chorale.config.engine import (
    BUCKET_FAMILIES,
    DEMO,
    EFFORTS,
    EngineConfig,
    ServerConfig,
    ToolConfig,
    check_ranks,
    check_sizes,
)
from chorale.config.model_names import full_name
from chorale.config.options.compilation import LEVELS, MODES, read_compilation
from chorale.config.options.flags import FLAGS
from chorale.config.options.speculation import read_speculation
from chorale.config.options.values import Setting, check_bounds, wins
from chorale.config.read_objects import read_kv_events, read_modules, read_profiler, read_weight_transfer
from chorale.config.sampling_fields import GENERATION, SAMPLING_FIELDS
from chorale.errors import ConfigError

WATCHDOG_KEYS = ("timeout", "check_interval", "dump_dir")  # only the first has an effect
_MOST_BUCKETS = 100  # each is a series per label set
_COMPILATION = "--compilation-config"
# Keys of --compilation-config that separate flags, of the same names, also set.
_TWICE = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def build_configs(values: Mapping[str, Setting]) -> tuple[EngineConfig, ServerConfig, list[str]]:
    """Builds the configs of engine and server. Returns them, and lines for the operator about parts without
    effect. Raises ``ConfigError``."""
    fields = targets(values)
    engine, server, cli = fields["engine"], fields["server"], fields["cli"]
    if cli.get("disable_access_log"):
        server["access_log"] = False
    if (given := cli.get("template_defaults")) is not None:
        server["default_reasoning_effort"] = _default_effort(given)
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        if name in server:
            server[name] = _strings(name, server[name])
    server["tools"] = tool_config(fields["tools"])
    if engine.get("cudagraph_capture_sizes") is not None:
        engine["cudagraph_capture_sizes"] = _sizes(engine["cudagraph_capture_sizes"])
    if (given := cli.get("cuda_graph_sizes")) is not None:
        sizes = _sizes(given)
        if len(sizes) == 1:
            engine.setdefault("max_cudagraph_capture_size", sizes[0])
        else:
            engine.setdefault("cudagraph_capture_sizes", sizes)
    if "swap_space" in cli:
        engine.setdefault("kv_offloading_size", cli["swap_space"])
    if engine.get("device_ids") is not None:
        engine["device_ids"] = tuple(each.strip() for each in ",".join(engine["device_ids"]).split(","))
    if (given := cli.get("watchdog_config")) is not None:
        engine |= _watchdog(given, values)
    engine["speculative_config"], idle = read_speculation(values)
    notices = [*idle]
    engine |= _graphs(values)
    server |= _replica_fields(values)
    if (given := cli.get("kv_events_config")) is not None:
        events = read_kv_events(given, "--kv-events-config", server["data_parallel_size"])
        engine["kv_events_config"] = events
        silent = events.why_silent(engine.get("enable_prefix_caching") is not False)
        if given and silent:
            origin = values["kv-events-config"].origin
            notices.append(f"--kv-events-config ({origin}) publishes nothing: {silent}")
    engine["lora_modules"] = server["lora_modules"] = read_modules(engine.get("lora_modules") or ())
    server["enable_lora"] = engine.get("enable_lora")
    if (given := cli.get("profiler_config")) is not None:
        engine["profiler_config"] = read_profiler(given, "--profiler-config")
    if (given := cli.get("weight_transfer_config")) is not None:
        engine["weight_transfer_config"] = read_weight_transfer(given, "--weight-transfer-config")
    _name_both(fields)
    made = EngineConfig(**_without_unset(EngineConfig, engine))
    served = ServerConfig(**_without_unset(ServerConfig, server))
    _check(made, served)
    return made, served, notices


def _name_both(fields: dict[str, dict[str, Any]]) -> None:
    """Adds the full name ``openai/gpt-oss-20b`` to the served names of ``gpt-oss-20b``."""
    model = str(fields["engine"].get("model") or DEMO)
    named = fields["server"].get("served_model_names")
    if not named and full_name(model) != model and not Path(model).is_dir():
        fields["server"]["served_model_names"] = (model, full_name(model))


def targets(values: Mapping[str, Setting]) -> dict[str, dict[str, Any]]:
    """Returns {config: {field: value}} from each flag's ``target``, with synonyms resolved and bounds
    checked.
    """
    fields: dict[str, dict[str, Any]] = {"engine": {}, "server": {}, "tools": {}, "cli": {}}
    for name, setting in values.items():
        flag = FLAGS[name]
        check_bounds(flag, setting.value)
        if flag.target is not None:
            room, _, attribute = flag.target.partition(".")
            known = flag.synonyms
            fields[room][attribute] = known.get(setting.value, setting.value) if known else setting.value
    return fields


def _graphs(values: Mapping[str, Setting]) -> dict[str, Any]:
    """Returns the engine fields set by ``--compilation-config`` and ``-O``, unless a separate flag overrides
    them.
    """
    setting = values.get("compilation-config", Setting(None, "default"))
    found = {} if setting.value is None else read_compilation(setting.value)
    fields: dict[str, Any] = {}
    for key in _TWICE:
        name = key.replace("_", "-")
        if key in found and wins(setting, values.get(name), f"{key} in {_COMPILATION}", f"--{name}"):
            fields[key] = found[key]
    eager = values.get("enforce-eager")
    mode, level = found.get("cudagraph_mode"), values.get("optimization-level")
    if mode is not None:
        contradicting = eager if eager is not None and eager.value == MODES[mode][0] else None
        flag = f"--{'' if eager and eager.value else 'no-'}enforce-eager"
        if not wins(setting, contradicting, f"cudagraph_mode {mode} in {_COMPILATION}", flag):
            return fields
    elif level is not None and level.value is not None and eager is None:
        mode = LEVELS[level.value]
    if mode is not None:
        decodes, mixed = MODES[mode]
        fields |= {"enforce_eager": not decodes, "mixed_cuda_graphs": mixed}
    return fields


def tool_config(values: dict[str, Any]) -> ToolConfig:
    """Builds the tools' config from the ``tools.*`` targets."""
    if "servers" in values:
        items = ",".join(map(str, values["servers"])).split(",")
        values["servers"] = tuple(item.strip() for item in items if item.strip())
    if values.get("offline_pages") and "browser" not in values:
        values["browser"] = "offline"
    if values.get("search_url") and "browser" not in values:
        values["browser"] = "searxng"  # the only service that needs an address
    return ToolConfig(**_without_unset(ToolConfig, values))


def _sizes(items: Sequence[str]) -> tuple[int, ...]:
    """Parses ``1 2 4``, ``1,2,4`` or, from a file, ``[1, 2, 4]``."""
    try:
        return tuple(int(part) for item in items for part in str(item).strip("[]").split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--cudagraph-capture-sizes {' '.join(items)}: must be integers") from None


def _strings(name: str, given: Any) -> tuple[str, ...]:
    """Accepts a list of strings or a single string."""
    items = [given] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"""--{name.replace("_", "-")}: must be a list of strings, such as '["*"]'""")
    return tuple(items)


def _default_effort(given: Any) -> str:
    """Returns the reasoning effort, the only template option that can be a default."""
    effort = given.get("reasoning_effort") if isinstance(given, dict) and len(given) == 1 else None
    if effort not in ("low", "medium", "high"):
        raise ConfigError(
            "--default-chat-template-kwargs: must be "
            '{"reasoning_effort": EFFORT} with EFFORT "low", "medium" or "high"'
        )
    return str(effort)


def _watchdog(given: Any, values: Mapping[str, Setting]) -> dict[str, float]:
    """Returns the engine field of vLLM's watchdog, which here is the monitor of the engines."""
    if not isinstance(given, dict) or given.keys() - WATCHDOG_KEYS:
        raise ConfigError(f"--watchdog-config {given}: must be an object with {', '.join(WATCHDOG_KEYS)}")
    timeout = given.get("timeout")
    if timeout is None:
        return {}
    if type(timeout) not in (int, float):
        raise ConfigError(f"--watchdog-config: timeout: {timeout!r} is not a number of seconds")
    check_bounds(FLAGS["heartbeat-timeout"], timeout)
    if "heartbeat-timeout" in values:
        raise ConfigError("--watchdog-config: timeout and --heartbeat-timeout mean the same; give only one")
    return {"heartbeat_timeout": float(timeout)}


def _check_buckets(given: Any) -> None:
    if not isinstance(given, dict) or not given.keys() <= {*BUCKET_FAMILIES}:
        known = ", ".join(BUCKET_FAMILIES)
        raise ConfigError(f"--custom-histogram-buckets: must be a JSON object with names of {known}")
    for family, bounds in given.items():
        numbers = [bound for bound in bounds if type(bound) in (int, float)] if type(bounds) is list else []
        ordered = all(low < high for low, high in itertools.pairwise([0, *numbers, 1e300]))
        if numbers != bounds or not ordered or not 0 < len(bounds) <= _MOST_BUCKETS:
            raise ConfigError(
                f"--custom-histogram-buckets: {family}: not 1 to {_MOST_BUCKETS} increasing numbers above 0"
            )


def _check_efforts(given: Any) -> None:
    """Checks a map from names of efforts to names of efforts."""
    names = [*given, *given.values()] if isinstance(given, dict) else [given]
    if not all(isinstance(name, str) and name in EFFORTS for name in names):
        raise ConfigError(
            f"--reasoning-effort-map: must be a JSON object from efforts to efforts ({', '.join(EFFORTS)})"
        )


def _check_generation(given: Any) -> None:
    """Checks the ranges: those of the request fields, with ``max_tokens`` for ``max_new_tokens``."""
    if not isinstance(given, dict):
        raise ConfigError("--override-generation-config: must be a JSON object")
    for name, value in given.items():
        if name not in GENERATION:
            raise ConfigError(f"--override-generation-config: {name!r} is not one of {', '.join(GENERATION)}")
        allowed = SAMPLING_FIELDS[GENERATION[name]].http_range
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not allowed.holds(value):
            raise ConfigError(
                f"--override-generation-config: {name}: {value!r} is out of range: must be a number {allowed}"
            )


def _check_date(given: str) -> None:
    """Checks the date, which becomes part of every prompt."""
    try:
        if datetime.date.fromisoformat(given).isoformat() == given:
            return
    except ValueError:
        pass
    raise ConfigError(f"--system-start-date {given!r}: must be a date, YYYY-MM-DD")


def _without_unset(config: type, values: dict[str, Any]) -> dict[str, Any]:
    """Drops ``None`` values (from ``auto``), so that fields keep their defaults."""
    names = {f.name for f in dataclasses.fields(config)}
    return {k: v for k, v in values.items() if v is not None and k in names}


def _check(engine: EngineConfig, server: ServerConfig) -> None:
    if engine.override_generation_config is not None:
        _check_generation(engine.override_generation_config)
    if server.ssl_cert_reqs and not (server.ssl_certfile and server.ssl_ca_certs):
        raise ConfigError("--ssl-cert-reqs needs --ssl-certfile and --ssl-ca-certs")
    if (server.fingerprint_mode == "custom") != bool(server.fingerprint_value):
        raise ConfigError("--fingerprint-mode custom and --fingerprint-value must be given together")
    _check_buckets(server.histogram_buckets)
    _check_efforts(server.reasoning_effort_map)
    if server.ssl_ciphers and not server.ssl_certfile:
        raise ConfigError("--ssl-ciphers needs --ssl-certfile")
    if engine.dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"--dtype {engine.dtype}: must be auto, bfloat16 or float32")
    if server.system_start_date is not None:
        _check_date(server.system_start_date)
    cache_dtype(engine.kv_cache_dtype)
    if engine.model == DEMO and engine.revision is not None:
        raise ConfigError(
            f"--revision {engine.revision}: the demo model ships inside the package, which has no revisions"
        )
    if server.lora_updates and server.api_server_count > 1:
        raise ConfigError("--allow-runtime-lora-updating needs --api-server-count 1: each process has a list")
    check_ranks(engine)
    check_sizes(engine)
    if engine.device_ids and server.data_parallel_backend == "ray":
        raise ConfigError("--device-ids: Ray places the engines; leave it out")
    if engine.moe_activation_dtype not in ("auto", "bfloat16", "fp8"):
        raise ConfigError(
            f"--moe-activation-dtype {engine.moe_activation_dtype}: must be auto, bfloat16 or fp8"
        )
    if bool(server.ssl_keyfile) != bool(server.ssl_certfile):
        raise ConfigError("--ssl-keyfile and --ssl-certfile must be given together")


def _replica_fields(values: Mapping[str, Setting]) -> dict[str, Any]:
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
