"""Merges flags, environment and YAML into two frozen configs, and keeps the origin of each value.

Precedence: command line, then environment, then ``--config`` file, then default. An unknown name is an error
that suggests the nearest one. A flag of vLLM that has no effect here produces a one-line notice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from chorale.config.engine import EngineConfig, ServerConfig, hash_key, owner_name
from chorale.config.options import compilation
from chorale.config.options.configs import build_configs
from chorale.config.options.flags import FLAGS
from chorale.config.options.parse import read_arguments, read_config_file
from chorale.config.options.values import Setting, read_value
from chorale.config.options.vllm_flags import line_for, read_names
from chorale.errors import ConfigError

# Hosts that mean "all interfaces". Never a default.
OPEN_ADDRESSES = ("0.0.0.0", "::", "[::]", "")
_WEIGHT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3})?")
SHORTEST_CHAT = 256  # tokens of a prompt with a short answer
_READ = {name for flag in FLAGS.values() for name in flag.environment}


@dataclass(frozen=True, slots=True)
class Settings:
    """The merged configuration. ``notices``: lines for the operator, in order."""

    engine: EngineConfig
    server: ServerConfig
    values: dict[str, Setting]  # flag name -> value and origin, only of flags that are set
    notices: tuple[str, ...] = field(default=())

    @property
    def api_keys(self) -> tuple[str, ...]:
        """API keys from flag, file or environment.

        They are secrets: never print, log or pass them as arguments.
        """
        setting = self.values.get("api-key")
        return tuple(setting.value) if setting else ()


def merge(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Merges everything the operator specified. Raises ``ConfigError`` for anything unknown or invalid."""
    positionals, given = read_arguments(arguments)
    if len(positionals) > 1:
        raise ConfigError(f"only one model can be given: unexpected argument {positionals[1]!r}")
    if positionals and given.setdefault("model", positionals[0]) != positionals[0]:
        raise ConfigError(
            f"only one model can be given, not both {positionals[0]!r} and --model {given['model']!r}"
        )
    values: dict[str, Setting] = {}
    if "config" in given:
        values |= {k: Setting(v, "file") for k, v in read_config_file(given["config"]).items()}
    values |= {k: Setting(v, "command line") for k, v in given.items()}
    return merge_values(values, environment)


def merge_values(given: Mapping[str, Setting], environment: Mapping[str, str]) -> Settings:
    """Merges options with their origins, and the environment. Raises ``ConfigError`` as ``merge`` does."""
    values = {name: setting for name, setting in given.items() if setting.origin == "file"}
    values |= _from_environment(environment)
    values |= {name: setting for name, setting in given.items() if setting.origin != "file"}
    weights = _add_key_file(values)
    _trim_keys(values)
    notices = _flag_notices(values)
    engine, server, idle = build_configs(values)
    notices += [*idle, *_environment_notices(environment)]
    key = values.get("api-key")
    if key is not None and key.origin == "command line" and "api-key-file" not in values:
        notices.append("--api-key on the command line is visible in process lists; prefer CHORALE_API_KEY")
    return Settings(engine, replace(server, key_weights=_by_owner(weights)), values, tuple(notices))


def _from_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    """Reads the flags' environment variables, in the order each flag lists them.

    Empty ones count as unset.
    """
    found: dict[str, Setting] = {}
    for flag in FLAGS.values():
        variable = next((name for name in flag.environment if environment.get(name)), None)
        if variable is None:
            continue
        raw = environment[variable]
        try:
            value = read_value(flag, _level(raw) if flag.name == "uvicorn-log-level" else raw)
        except ValueError as error:
            raise ConfigError(f"{variable}: {error}") from None
        found[flag.name] = Setting(value, "environment")
    return found


def _level(raw: str) -> str:
    """Normalises a log level, including the synonyms of Python's logging, WARN and FATAL."""
    number = logging.getLevelNamesMapping().get(raw.upper())
    return raw.lower() if number is None else logging.getLevelName(number).lower()


def _add_key_file(values: dict[str, Setting]) -> dict[str, float]:
    """Adds the keys of the file. Returns the weights of those that have one."""
    setting = values.get("api-key-file")
    if setting is None:
        return {}
    try:
        lines = Path(setting.value).read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file {setting.value}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {setting.value}: not UTF-8 text") from None
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not found:
        raise ConfigError(f"--api-key-file {setting.value}: contains no key")
    weights: dict[str, float] = {}
    for number, line in enumerate(found):
        key, has_weight, weight = line.rpartition(" weight=")
        if has_weight:
            if not _WEIGHT.fullmatch(weight) or not 0.01 <= float(weight) <= 100:
                raise ConfigError(f"--api-key-file {setting.value}: a weight is not between 0.01 and 100")
            found[number] = key.strip()
            weights[found[number]] = float(weight)
    values["api-key"] = Setting(tuple(found), setting.origin)
    return weights


def _by_owner(weights: Mapping[str, float]) -> dict[str, float]:
    return {owner_name(hash_key(key)): weight for key, weight in weights.items()}


def _trim_keys(values: dict[str, Setting]) -> None:
    """Strips white space around keys, such as a secret file's final line end, since a header cannot carry it.

    Raises ``ConfigError`` for an empty key: a bare 'Bearer' header would match it.
    """
    setting = values.get("api-key")
    if setting is None:
        return
    keys = tuple(key.strip() for key in setting.value)
    if not all(keys):
        raise ConfigError(f"--api-key ({setting.origin}): a key is empty")
    values["api-key"] = Setting(keys, setting.origin)


def _flag_notices(values: Mapping[str, Setting]) -> list[str]:
    """Returns a line per flag without effect. Raises ``ConfigError`` for a refused flag."""
    return [line for name, setting in values.items() if (line := _notice(name, setting))]


def _notice(name: str, setting: Setting) -> str | None:
    flag, value = FLAGS[name], setting.value
    shown = f"--{'no-' if value is False else ''}{name} ({setting.origin})"
    if name == "compilation-config" and value is not None:
        return compilation.notice(value, shown)
    if name == "optimization-level" and value is not None:
        return compilation.level_notice(value, shown)
    if name == "cuda-graph-sizes" and value is not None and len(value) == 1 and "," not in value[0]:
        return f"{shown} {value[0]}: a single number is the largest size, as in vLLM"
    if name == "max-model-len" and value is not None and value < SHORTEST_CHAT:
        return f"{shown} {value}: a chat prompt alone takes about 70 tokens"
    if name == "watchdog-config" and isinstance(value, dict) and value.keys() - {"timeout"}:
        return f"{shown}: only timeout has an effect: heartbeats are read often, and stacks go to the log"
    if name == "swap-space" and value:
        return f"{shown} is accepted and taken as --kv-offloading-size {value:g}: sequences are not swapped"
    if flag.target is not None or not flag.asks(value):
        return None
    if flag.effect == "refused":
        asked = f" {value}" if flag.harmless else ""
        raise ConfigError(f"--{name}{asked} ({setting.origin}) is not supported: {flag.note}")
    needless = flag.effect == "not needed" and value is not False
    return (
        f"{shown} is {'accepted and not needed' if needless else 'accepted and has no effect'}: {flag.note}"
    )


def _environment_notices(environment: Mapping[str, str]) -> list[str]:
    """Returns notices about vLLM's variables without effect: one per known reason, one for the others."""
    notices, unread = [], []
    lines = {line.name: line for line in read_names("env")}
    for name in sorted(name for name, value in environment.items() if value and name not in _READ):
        line = line_for(name, lines)
        if line is None:
            unread += [name] if name.startswith("VLLM_") else []
        elif line.asks(environment[name]):
            verb = "needed" if line.treatment == "not needed" else "read by Chorale"
            notices.append(f"{name} is not {verb}: {line.reason}")
    if unread:
        notices.append(f"not read by Chorale: {', '.join(unread)}")
    return notices
