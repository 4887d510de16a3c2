"""Settings: flags, environment and YAML merged into two frozen configs, each value with its origin.

Precedence: command line, then environment, then ``--config`` file, then default. An unknown name is an
error that offers the nearest one; a known name that Chorale does not need is one line of notice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chorale.cli.options import compilation
from chorale.cli.options.configs import build_configs
from chorale.cli.options.flags import FLAGS
from chorale.cli.options.parse import read_arguments, read_config_file
from chorale.cli.options.values import Setting, check_bounds, read_value
from chorale.cli.options.vllm_flags import KNOWN_ENVIRONMENT, KNOWN_FAMILIES, OTHER_VENDORS, SILENT_FAMILIES
from chorale.config import ONE_DEVICE, EngineConfig, ServerConfig
from chorale.errors import ConfigError

# Hosts that mean "every interface": compared with what the operator asked for, never a default of ours.
OPEN_ADDRESSES = ("0.0.0.0", "::", "[::]", "")
_READ = {name for flag in FLAGS.values() for name in flag.environment}


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
    engine, server = build_configs(values)
    return Settings(engine, server, values, tuple(notices))


def _from_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    """The variables that flags name, each list of them in order. Empty ones are not set."""
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
    for name, setting in values.items():
        check_bounds(FLAGS[name], setting.value)
    notices = [line for name, setting in values.items() if (line := _notice(name, setting))]
    notices += _environment_notices(environment)
    key = values.get("api-key")
    if key is not None and key.origin == "command line" and "api-key-file" not in values:
        notices.append("--api-key on the command line shows in process lists; prefer CHORALE_API_KEY")
    return notices


def _notice(name: str, setting: Setting) -> str | None:
    flag, value = FLAGS[name], setting.value
    shown = f"--{'no-' if value is False else ''}{name} ({setting.origin})"
    if name == "compilation-config" and value is not None:
        return compilation.notice(value, shown)
    if name == "optimization-level" and value is not None:
        return compilation.level_notice(value, shown)
    if name == "tensor-parallel-size" and value not in (None, 1):
        raise ConfigError(f"--{name} {value} ({setting.origin}) is not served: {ONE_DEVICE}")
    if flag.target is not None or not flag.asks(value):
        return None
    if flag.effect == "refused":
        asked = f" {value}" if flag.kind == "int" else ""
        raise ConfigError(f"--{name}{asked} ({setting.origin}) is not served: {flag.note}")
    needless = flag.effect == "not needed" and value is not False
    return (
        f"{shown} is {'accepted and not needed' if needless else 'accepted and has no effect'}: {flag.note}"
    )


def _environment_notices(environment: Mapping[str, str]) -> list[str]:
    """vLLM's variables that mean nothing here: those with a reason one by one, the others in one line."""
    notices, unread = [], []
    for name in sorted(environment):
        vendor = next((why for start, why in OTHER_VENDORS.items() if name.startswith(start)), None)
        if vendor is not None and environment[name]:
            notices.append(f"{name} is not read by Chorale: {vendor}")
        if vendor is not None or not name.startswith("VLLM_") or name in _READ:
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
