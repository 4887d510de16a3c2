"""Settings: flags, environment and YAML merged into two frozen configs, each value with its origin.

Precedence: command line, then environment, then ``--config`` file, then default. An unknown name is an
error that offers the nearest one; a known name that Chorale does not need is one line of notice.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chorale.cli.flags import ALIASES, FLAGS, KNOWN_ENVIRONMENT, SHORT_FLAGS, Flag, read_value
from chorale.config import EngineConfig, ServerConfig, ToolConfig
from chorale.errors import ConfigError

# Hosts that mean "every interface": compared with what the operator asked for, never a default of ours.
OPEN_ADDRESSES = ("0.0.0.0", "::", "[::]", "")

Origin = Literal["command line", "environment", "file", "default"]

# Environment names that users of the field already set -> flag.
ENVIRONMENT = {
    "VLLM_SYSTEM_START_DATE": "system-start-date",
    "CHORALE_SYSTEM_START_DATE": "system-start-date",
    "VLLM_LOGGING_LEVEL": "uvicorn-log-level",
}


@dataclass(frozen=True, slots=True)
class Setting:
    value: Any
    origin: Origin


@dataclass(frozen=True, slots=True)
class Settings:
    """The merged result. ``notices`` are lines for the operator, in order."""

    engine: EngineConfig
    server: ServerConfig
    values: dict[str, Setting]  # flag name -> value and origin, for what was set
    notices: tuple[str, ...] = field(default=())

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Keys from flag, file or environment. Secrets: never print, log or pass as an argument."""
        setting = self.values.get("api-key")
        return tuple(setting.value) if setting else ()


def find_flag(name: str) -> tuple[Flag, bool]:
    """The flag behind a name (dashes or underscores, ``no-`` forms, aliases) and whether it is negated.

    Raises ``ConfigError`` with the nearest names for an unknown one.
    """
    wanted = name.replace("_", "-")
    wanted = ALIASES.get(wanted, wanted)
    if wanted in FLAGS:
        return FLAGS[wanted], False
    if wanted.startswith("no-") and wanted[3:] in FLAGS and FLAGS[wanted[3:]].kind == "bool":
        return FLAGS[wanted[3:]], True
    near = difflib.get_close_matches(wanted, [*FLAGS, *ALIASES], n=2, cutoff=0.6)
    hint = f"; did you mean {' or '.join('--' + n for n in near)}?" if near else ""
    raise ConfigError(f"unknown option --{wanted}{hint}")


def read_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into positionals and {flag name: value}. Raises ``ConfigError``."""
    positionals: list[str] = []
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if token == "--":
            positionals.extend(rest)
            break
        if not token.startswith("-") or token == "-":
            positionals.append(token)
            continue
        name, inline = _split_option(token)
        flag, negated = find_flag(name)
        values[flag.name] = _take_value(flag, negated, inline, rest, f"--{flag.name}")
    return positionals, values


def _split_option(token: str) -> tuple[str, str | None]:
    head, separator, inline = token.partition("=")
    value = inline if separator else None
    if head.startswith("--"):
        name, _, path = head[2:].partition(".")
        return name, _dotted(path, value)
    short, _, path = head.partition(".")
    if short.startswith("-O") and short != "-O":  # -O3
        return SHORT_FLAGS["-O"], short[2:]
    if short not in SHORT_FLAGS:
        raise ConfigError(f"unknown option {head}; options are written --like-this")
    return SHORT_FLAGS[short], _dotted(path, value)


def _dotted(path: str, value: str | None) -> str | None:
    """vLLM's ``--compilation-config.a.b=v`` form: only ever met on options that take JSON."""
    if not path:
        return value
    return "{}"


def _take_value(flag: Flag, negated: bool, inline: str | None, rest: list[str], shown: str) -> Any:
    try:
        if flag.kind == "bool":
            value = True if inline is None else read_value(flag, inline)
            return not value if negated else value
        if flag.kind == "list":
            items = [inline] if inline is not None else []
            while rest and not rest[0].startswith("-") and inline is None:
                items.append(rest.pop(0))
            if not items:
                raise ConfigError(f"{shown} needs a value")
            return read_value(flag, items)
        if inline is None:
            if not rest or (rest[0].startswith("--") and len(rest[0]) > 2):
                raise ConfigError(f"{shown} needs a value")
            inline = rest.pop(0)
        return read_value(flag, inline)
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}") from None


def read_config_file(path: str) -> dict[str, Any]:
    """``--config`` YAML: {flag name: value}. Raises ``ConfigError`` naming the file and the key."""
    import yaml

    file = Path(path)
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config {path}: only .yaml and .yml files are read")
    try:
        loaded = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: the file must hold keys and values")
    return dict(_read_file_items(loaded, path))


def _read_file_items(loaded: Mapping[Any, Any], path: str) -> list[tuple[str, Any]]:
    items = []
    for key, raw in loaded.items():
        try:
            flag, negated = find_flag(str(key))
            if flag.name == "config":
                raise ConfigError("a configuration file cannot name another one")
            value = read_value(flag, raw)
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error.message.replace('option --', 'key ')}") from None
        except ValueError as error:
            raise ConfigError(f"--config {path}: {key}: {error}") from None
        if flag.kind == "bool" and value is False and not negated:
            items.append((flag.name, False))
            continue
        items.append((flag.name, not value if negated else value))
    return items


def merge(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Everything the operator said, merged. Raises ``ConfigError`` on anything unknown or unreadable."""
    positionals, given = read_arguments(arguments)
    if len(positionals) > 1:
        raise ConfigError(f"one model at a time: unexpected argument {positionals[1]!r}")
    if positionals:
        given.setdefault("model", positionals[0])
    values: dict[str, Setting] = {}
    if "config" in given:
        values |= {k: Setting(v, "file") for k, v in read_config_file(given["config"]).items()}
    values |= _from_environment(environment)
    values |= {k: Setting(v, "command line") for k, v in given.items()}
    _add_key_file(values)
    notices = _notices(values, environment)
    engine, server = _build(values)
    return Settings(engine, server, values, tuple(notices))


def _from_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for variable, name in ENVIRONMENT.items():
        raw = environment.get(variable)
        if raw:
            try:
                value = read_value(FLAGS[name], raw.lower() if name == "uvicorn-log-level" else raw)
            except ValueError as error:
                raise ConfigError(f"{variable}: {error}") from None
            found[name] = Setting(value, "environment")
    for variable in ("CHORALE_API_KEY", "VLLM_API_KEY"):
        if environment.get(variable):
            found["api-key"] = Setting((environment[variable],), "environment")
            break
    return found


def _add_key_file(values: dict[str, Setting]) -> None:
    setting = values.get("api-key-file")
    if setting is None:
        return
    try:
        lines = Path(setting.value).read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file {setting.value}: {error.strerror}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {setting.value}: no key in it")
    values["api-key"] = Setting(keys, setting.origin)


def _notices(values: Mapping[str, Setting], environment: Mapping[str, str]) -> list[str]:
    notices = [
        f"--{name} ({setting.origin}) is accepted and not needed: {FLAGS[name].note}"
        for name, setting in values.items()
        if FLAGS[name].target is None and setting.value is not False
    ]
    notices += [
        f"{name} is not needed: {why}" for name, why in KNOWN_ENVIRONMENT.items() if name in environment
    ]
    key = values.get("api-key")
    if key is not None and key.origin == "command line" and "api-key-file" not in values:
        notices.append("--api-key on the command line shows in process lists; prefer CHORALE_API_KEY")
    return notices


def _build(values: Mapping[str, Setting]) -> tuple[EngineConfig, ServerConfig]:
    fields: dict[str, dict[str, Any]] = {"engine": {}, "server": {}, "tools": {}, "cli": {}}
    for name, setting in values.items():
        target = FLAGS[name].target
        if target is not None:
            room, _, attribute = target.partition(".")
            fields[room][attribute] = setting.value
    if fields["cli"].get("disable_access_log"):
        fields["server"]["access_log"] = False
    if fields["engine"].get("generation_config") == "vllm":
        fields["engine"]["generation_config"] = "none"
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        if name in fields["server"]:
            fields["server"][name] = tuple(fields["server"][name])
    fields["server"]["tools"] = tool_config(fields["tools"])
    if "cudagraph_capture_sizes" in fields["engine"]:
        fields["engine"]["cudagraph_capture_sizes"] = _sizes(fields["engine"]["cudagraph_capture_sizes"])
    engine = EngineConfig(**_without_unset(EngineConfig, fields["engine"]))
    server = ServerConfig(**_without_unset(ServerConfig, fields["server"]))
    _check(engine, server)
    return engine, server


def tool_config(values: dict[str, Any]) -> ToolConfig:
    """``tools.*`` targets as one config. Raises ``ConfigError`` for what cannot be meant."""
    if "servers" in values:
        items = ",".join(map(str, values["servers"])).split(",")
        values["servers"] = tuple(item.strip() for item in items if item.strip())
    if values.get("offline_pages") and "browser" not in values:
        values["browser"] = "offline"
    if values.get("search_url") and "browser" not in values:
        values["browser"] = "searxng"  # the one service that needs an address
    config = ToolConfig(**_without_unset(ToolConfig, values))
    for name in ("python_timeout", "call_timeout", "fetch_timeout"):
        if not 0 < getattr(config, name) <= 3600:
            raise ConfigError("tool timeouts must be above 0 and at most 3600 seconds")
    if config.python_memory_bytes < 64 * 2**20:
        raise ConfigError("--python-tool-memory must be at least 64 MiB")
    if config.python_processes < 1 or config.python_sessions < 1 or config.fetch_bytes < 1024:
        raise ConfigError("--python-tool-processes and --python-tool-sessions must be at least 1")
    return config


def _sizes(items: Sequence[str]) -> tuple[int, ...]:
    """``1 2 4`` or ``1,2,4`` or, from a file, ``[1, 2, 4]``."""
    try:
        return tuple(int(part) for item in items for part in str(item).strip("[]").split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--cudagraph-capture-sizes {' '.join(items)}: not numbers of rows") from None


def _without_unset(config: type, values: dict[str, Any]) -> dict[str, Any]:
    """``None`` (from ``auto``) falls back to the field's own default."""
    names = {f.name for f in dataclasses.fields(config)}
    return {k: v for k, v in values.items() if v is not None and k in names}


def _check(engine: EngineConfig, server: ServerConfig) -> None:
    if not 0 < engine.gpu_memory_utilization <= 1:
        raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1")
    if not 0 <= server.port <= 65535:
        raise ConfigError("--port must be between 0 and 65535")
    if server.stream_interval < 1:
        raise ConfigError("--stream-interval must be at least 1")
    if not 1 <= server.api_server_count <= 64:
        raise ConfigError("--api-server-count must be between 1 and 64")
    if engine.dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"--dtype {engine.dtype}: gpt-oss runs in bfloat16 or float32")
    if engine.kv_cache_dtype not in ("auto", "bfloat16", "float32", "fp8", "fp8_e4m3"):
        raise ConfigError(f"--kv-cache-dtype {engine.kv_cache_dtype}: auto, bfloat16, float32 or fp8")
    if engine.moe_activation_dtype not in ("auto", "bfloat16", "fp8"):
        raise ConfigError(f"--moe-activation-dtype {engine.moe_activation_dtype}: auto, bfloat16 or fp8")
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
        value = getattr(engine, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if bool(server.ssl_keyfile) != bool(server.ssl_certfile):
        raise ConfigError("--ssl-keyfile and --ssl-certfile go together")
