"""Settings: flags, environment and YAML merged into two frozen configs, each value with its origin.

Precedence: command line, then environment, then ``--config`` file, then default. An unknown name is an
error that offers the nearest one; a known name that Chorale does not need is one line of notice.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chorale.cli.arguments import read_arguments, read_config_file
from chorale.cli.flags import FLAGS
from chorale.cli.known import KNOWN_ENVIRONMENT, KNOWN_FAMILIES, SILENT_FAMILIES
from chorale.cli.values import read_value
from chorale.config import GENERATION, EngineConfig, ServerConfig, ToolConfig
from chorale.errors import ConfigError
from chorale.runtime.cache_dtype import cache_dtype
from chorale.runtime.resolve import check_ranks, check_sizes

# Hosts that mean "every interface": compared with what the operator asked for, never a default of ours.
OPEN_ADDRESSES = ("0.0.0.0", "::", "[::]", "")

Origin = Literal["command line", "environment", "file", "default"]

# Environment names that users of the field already set -> flag.
ENVIRONMENT = {
    "VLLM_SYSTEM_START_DATE": "system-start-date",
    "CHORALE_SYSTEM_START_DATE": "system-start-date",
    "VLLM_LOGGING_LEVEL": "uvicorn-log-level",
}
KEY_VARIABLES = ("CHORALE_API_KEY", "VLLM_API_KEY")
# The smallest values that can be meant (nan is below them all), beside those of ``check_sizes``.
LEAST = {
    **dict.fromkeys(("stream-interval", "max-body-bytes", "response-store-ttl"), 1),
    **dict.fromkeys(("h11-max-header-count", "h11-max-incomplete-event-size"), 1),
    **dict.fromkeys(("response-store-max-items", "response-store-max-bytes"), 1),
    **dict.fromkeys(("shutdown-timeout", "max-background-responses"), 0),
}
MOST = 2**63 - 1  # what a message between processes carries; no infinite time, either
# vLLM's other names for the same thing.
SYNONYMS = {
    "generation-config": {"vllm": "none"},
    "uvicorn-log-level": {"trace": "debug", "critical": "error"},
    "dtype": {"float": "float32"},
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


def merge(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Everything the operator said, merged. Raises ``ConfigError`` on anything unknown or unreadable."""
    positionals, given = read_arguments(arguments)
    if len(positionals) > 1:
        raise ConfigError(f"one model at a time: unexpected argument {positionals[1]!r}")
    if positionals and given.setdefault("model", positionals[0]) != positionals[0]:
        raise ConfigError(f"one model at a time: {positionals[0]!r} is named, and --model {given['model']!r}")
    values: dict[str, Setting] = {}
    if "config" in given:
        values |= {k: Setting(v, "file") for k, v in read_config_file(given["config"]).items()}
    values |= _from_environment(environment)
    values |= {k: Setting(v, "command line") for k, v in given.items()}
    _add_key_file(values)
    _trim_keys(values)
    notices = _notices(values, environment)
    engine, server = _build(values)
    return Settings(engine, server, values, tuple(notices))


def _from_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for variable, name in ENVIRONMENT.items():
        raw = environment.get(variable)
        if raw:
            try:
                value = read_value(FLAGS[name], _level(raw) if name == "uvicorn-log-level" else raw)
            except ValueError as error:
                raise ConfigError(f"{variable}: {error}") from None
            found[name] = Setting(value, "environment")
    for variable in KEY_VARIABLES:
        if environment.get(variable):
            found["api-key"] = Setting((environment[variable],), "environment")
            break
    return found


def _level(raw: str) -> str:
    """As vLLM hands it to Python's logging, which has two names for some levels: WARN, FATAL."""
    number = logging.getLevelNamesMapping().get(raw.upper())
    return raw.lower() if number is None else logging.getLevelName(number).lower()


def _add_key_file(values: dict[str, Setting]) -> None:
    setting = values.get("api-key-file")
    if setting is None:
        return
    try:
        lines = Path(setting.value).read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file {setting.value}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {setting.value}: is not text") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {setting.value}: no key in it")
    values["api-key"] = Setting(keys, setting.origin)


def _trim_keys(values: dict[str, Setting]) -> None:
    """Keys as clients can send them: blanks around one, as a secret's last line end, are no part of a header.

    An empty one is an error: who sends no more than the word Bearer would have it.
    """
    setting = values.get("api-key")
    if setting is None:
        return
    keys = tuple(key.strip() for key in setting.value)
    if not all(keys):
        raise ConfigError(f"--api-key ({setting.origin}): a key is empty")
    values["api-key"] = Setting(keys, setting.origin)


def _notices(values: Mapping[str, Setting], environment: Mapping[str, str]) -> list[str]:
    """One line for each thing that is accepted and does nothing. Raises ``ConfigError`` for a refused one."""
    notices = []
    for name, setting in values.items():
        flag = FLAGS[name]
        if flag.target is not None or not flag.asks(setting.value):
            continue
        if flag.effect == "refused":
            raise ConfigError(f"--{name} ({setting.origin}) is not served: {flag.note}")
        needless = flag.effect == "not needed" and setting.value is not False
        what = "accepted and not needed" if needless else "accepted and has no effect"
        shown = f"--no-{name}" if setting.value is False else f"--{name}"
        notices.append(f"{shown} ({setting.origin}) is {what}: {flag.note}")
    notices += _environment_notices(environment)
    key = values.get("api-key")
    if key is not None and key.origin == "command line" and "api-key-file" not in values:
        notices.append("--api-key on the command line shows in process lists; prefer CHORALE_API_KEY")
    return notices


def _environment_notices(environment: Mapping[str, str]) -> list[str]:
    """vLLM's variables that mean nothing here: those with a reason one by one, the others in one line."""
    notices, unread = [], []
    for name in sorted(environment):
        if not name.startswith("VLLM_") or name in ENVIRONMENT or name in KEY_VARIABLES:
            continue
        family = next((why for start, why in KNOWN_FAMILIES.items() if name.startswith(start)), None)
        why = KNOWN_ENVIRONMENT.get(name) or family
        if why is not None:
            notices.append(f"{name} is not needed: {why}")
        elif not name.startswith(SILENT_FAMILIES):
            unread.append(name)
    if unread:
        notices.append(f"not read by Chorale: {', '.join(unread)}")
    return notices


def _build(values: Mapping[str, Setting]) -> tuple[EngineConfig, ServerConfig]:
    fields: dict[str, dict[str, Any]] = {"engine": {}, "server": {}, "tools": {}, "cli": {}}
    for name, setting in values.items():
        target = FLAGS[name].target
        if target is not None:
            room, _, attribute = target.partition(".")
            known = SYNONYMS.get(name)
            fields[room][attribute] = known.get(setting.value, setting.value) if known else setting.value
    if fields["cli"].get("disable_access_log"):
        fields["server"]["access_log"] = False
    if fields["cli"].get("template_defaults") is not None:
        fields["server"]["default_reasoning_effort"] = _default_effort(fields["cli"]["template_defaults"])
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        if name in fields["server"]:
            fields["server"][name] = _texts(name, fields["server"][name])
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
    if config.fetch_bytes < 1024:
        raise ConfigError("--browser-tool-bytes must be at least 1024")
    if config.python_processes < 1 or config.python_sessions < 1:
        raise ConfigError("--python-tool-processes and --python-tool-sessions must be at least 1")
    return config


def _sizes(items: Sequence[str]) -> tuple[int, ...]:
    """``1 2 4`` or ``1,2,4`` or, from a file, ``[1, 2, 4]``."""
    try:
        return tuple(int(part) for item in items for part in str(item).strip("[]").split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--cudagraph-capture-sizes {' '.join(items)}: not numbers of rows") from None


def _texts(name: str, given: Any) -> tuple[str, ...]:
    """A JSON list of texts, or one text."""
    items = [given] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"""--{name.replace("_", "-")}: must be a list of texts, such as '["*"]'""")
    return tuple(items)


def _default_effort(given: Any) -> str:
    """The one template option of gpt-oss that has a meaning for every request."""
    effort = given.get("reasoning_effort") if isinstance(given, dict) and len(given) == 1 else None
    if effort not in ("low", "medium", "high"):
        raise ConfigError(
            "--default-chat-template-kwargs: only "
            '{"reasoning_effort": "low"}, "medium" or "high" can be a default'
        )
    return str(effort)


def _check_generation(given: Any) -> None:
    """Ranges are those of the request fields; ``max_new_tokens`` is ``max_tokens`` there."""
    from chorale.api.limits import LIMITS

    if not isinstance(given, dict):
        raise ConfigError("--override-generation-config: must be a JSON object")
    for name, value in given.items():
        limit = LIMITS["max_tokens" if name == "max_new_tokens" else name] if name in GENERATION else None
        if limit is None:
            raise ConfigError(f"--override-generation-config: {name!r} is not one of {', '.join(GENERATION)}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not limit.min <= value <= limit.max or (limit.exclusive_min and value == limit.min):
            raise ConfigError(f"--override-generation-config: {name}: {value!r} is out of range")


def _without_unset(config: type, values: dict[str, Any]) -> dict[str, Any]:
    """``None`` (from ``auto``) falls back to the field's own default."""
    names = {f.name for f in dataclasses.fields(config)}
    return {k: v for k, v in values.items() if v is not None and k in names}


def _check_numbers(engine: EngineConfig, server: ServerConfig) -> None:
    """The rest of the numbers: none below what can be meant, none that a message cannot carry."""
    rooms = {"engine": engine, "server": server, "tools": server.tools}
    for flag in FLAGS.values():
        room, _, attribute = (flag.target or "").partition(".")
        if flag.kind not in ("int", "size", "float") or room not in rooms:
            continue
        value = getattr(rooms[room], attribute)
        least = LEAST.get(flag.name, -MOST)
        if value is not None and not least <= value:
            raise ConfigError(f"--{flag.name} must be at least {least}")
        if value is not None and not value <= MOST:
            raise ConfigError(f"--{flag.name} {value}: is too large")


def check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError("--port must be between 0 and 65535")


def _check(engine: EngineConfig, server: ServerConfig) -> None:
    if engine.override_generation_config is not None:
        _check_generation(engine.override_generation_config)
    if server.ssl_cert_reqs not in (0, 1, 2):
        raise ConfigError("--ssl-cert-reqs must be 0, 1 or 2")
    if server.ssl_cert_reqs and not (server.ssl_certfile and server.ssl_ca_certs):
        raise ConfigError("--ssl-cert-reqs needs --ssl-certfile and --ssl-ca-certs")
    check_port(server.port)
    if not 1 <= server.api_server_count <= 64:
        raise ConfigError("--api-server-count must be between 1 and 64")
    if engine.dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"--dtype {engine.dtype}: gpt-oss runs in bfloat16 or float32")
    cache_dtype(engine.kv_cache_dtype)
    check_ranks(engine)
    check_sizes(engine)
    if engine.moe_activation_dtype not in ("auto", "bfloat16", "fp8"):
        raise ConfigError(f"--moe-activation-dtype {engine.moe_activation_dtype}: auto, bfloat16 or fp8")
    _check_numbers(engine, server)
    if bool(server.ssl_keyfile) != bool(server.ssl_certfile):
        raise ConfigError("--ssl-keyfile and --ssl-certfile go together")
