"""Parses a command line or a ``--config`` file into {flag name: value}, without interpreting the values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from chorale.config.options.flags import ALIASES, FLAGS
from chorale.config.options.values import Flag, read_value
from chorale.config.options.vllm_flags import SHORT_FLAGS
from chorale.config.suggestions import nearest
from chorale.errors import ConfigError

if TYPE_CHECKING:
    from yaml import Node, YAMLError


def find_flag(name: str, what: str = "option --") -> tuple[Flag, bool]:
    """Finds a flag by name (dashes or underscores, ``no-`` forms, aliases). Returns it and whether it is
    negated.

    Raises ``ConfigError`` with the nearest names if there is no such flag. ``what``: the prefix of names in
    messages.
    """
    wanted = name.replace("_", "-")
    wanted = ALIASES.get(wanted, wanted)
    if wanted in FLAGS:
        return FLAGS[wanted], False
    if wanted.startswith("no-") and wanted[3:] in FLAGS and FLAGS[wanted[3:]].kind == "bool":
        return FLAGS[wanted[3:]], True
    hint = nearest(wanted.lstrip("-"), [*FLAGS, *ALIASES], what.partition(" ")[2])
    raise ConfigError(f"unknown {what}{wanted}{hint}")


def flag_names() -> dict[str, str]:
    """Returns every spelling of ``chorale serve``'s long options, mapped to the flag's name."""
    names = {name: name for name in FLAGS} | ALIASES
    return names | {f"no-{name}": f"no-{name}" for name, flag in FLAGS.items() if flag.kind == "bool"}


def read_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Splits a command line into positionals and {flag name: value}. Raises ``ConfigError``."""
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
        option = _split_option(token)
        flag, negated = find_flag(option.name)
        if option.path:
            values[flag.name] = _merged(values.get(flag.name), _take_part(flag, option, rest))
        else:
            value = _take_value(flag, negated, option.inline, rest, _shown(flag, option))
            if flag.adds:
                value = [*values.get(flag.name, ()), *value]
            values[flag.name] = value
    return positionals, values


def _shown(flag: Flag, option: Option) -> str:
    """Returns the flag as it was written, if that is one of its names."""
    return f"--{option.name if option.name in flag.aliases else flag.name}"


@dataclass(frozen=True, slots=True)
class Option:
    """An option ``--name.path=inline``. Like vLLM, ``path`` sets a part of a JSON value."""

    name: str
    path: str
    inline: str | None


def _split_option(token: str) -> Option:
    head, separator, text = token.partition("=")
    inline = text if separator else None
    if head.startswith("--"):
        name, _, path = head[2:].partition(".")
        return Option(name, path, inline)
    short, _, path = head.partition(".")
    if short == "-O" and path:
        return Option("compilation-config", path, inline)
    if short.startswith("-O") and short != "-O":  # -O3
        return Option(SHORT_FLAGS["-O"], "", short[2:])
    if short not in SHORT_FLAGS:
        raise ConfigError(f"unknown option {head}; options have the form --like-this")
    return Option(SHORT_FLAGS[short], path, inline)


def _take_part(flag: Flag, option: Option, rest: list[str]) -> dict[str, Any]:
    """Reads ``--override-generation-config.temperature 0.7`` as ``{"temperature": 0.7}``."""
    shown = f"--{flag.name}.{option.path}"
    if flag.kind != "json":
        raise ConfigError(f"{shown}: --{flag.name} does not accept .KEY")
    text = option.inline
    if text is None:
        if not rest or rest[0].startswith("--"):
            raise ConfigError(f"{shown} needs a value")
        text = rest.pop(0)
    try:
        value = json.loads(text)
    except ValueError:
        value = {"True": True, "False": False, "None": None}.get(text, text)
    for key in reversed(option.path.split(".")):
        value = {key.removesuffix("+"): [value] if key.endswith("+") else value}
    return cast(dict[str, Any], value)


def _merged(old: Any, new: dict[str, Any]) -> dict[str, Any]:
    """Merges two parts of a JSON value; appends to lists (``--x.list+ value``)."""
    if not isinstance(old, dict):
        return new
    both = dict(old)
    for key, value in new.items():
        before = both.get(key)
        if isinstance(before, list) and isinstance(value, list):
            both[key] = [*before, *value]
        else:
            both[key] = _merged(before, value) if isinstance(value, dict) else value
    return both


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
    """Reads a ``--config`` YAML file into {flag name: value}.

    Raises ``ConfigError`` with the file and the key.
    """
    import yaml

    file = Path(path)
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config {path}: only .yaml and .yml files are read")
    try:
        text = file.read_text("utf-8")
        _check_twice(yaml.compose(text, yaml.SafeLoader))
        loaded = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}{_yaml_fault(error)}; correct the file") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: must contain a mapping of options to values")
    return read_mapping(loaded, f"--config {path}")


def _check_twice(node: Node | None) -> None:
    """Raises ``YAMLError`` for an option that a file sets twice: the reader would take the last one."""
    from yaml import MappingNode
    from yaml.constructor import ConstructorError

    seen = set()
    for key, _ in node.value if isinstance(node, MappingNode) else ():
        if str(key.value) in seen:
            raise ConstructorError(problem=f"{key.value} is set twice", problem_mark=key.start_mark)
        seen.add(str(key.value))


def _yaml_fault(error: YAMLError) -> str:
    """Returns position and problem, without the parser's name for its input and without line breaks."""
    mark = getattr(error, "problem_mark", None)
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    parts = [getattr(error, name, None) for name in ("context", "problem")]
    problem = ", ".join(part for part in parts if part) or str(error).splitlines()[0]
    return f"{where}: not valid YAML: {' '.join(problem.split())}"


def read_mapping(loaded: Mapping[Any, Any], origin: str) -> dict[str, Any]:
    """Reads a mapping of options to values, as in a ``--config`` file, into {flag name: value}.

    Raises ``ConfigError`` with ``origin`` and the key.
    """
    values: dict[str, Any] = {}
    for key, raw in loaded.items():
        try:
            flag, negated = find_flag(str(key), "key ")
            if flag.name == "config":
                raise ConfigError("a configuration file cannot include another one")
            if raw is None:  # a key without a value (from a template) is not set
                continue
            value = read_value(flag, raw)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error.message}") from None
        except ValueError as error:
            raise ConfigError(f"{origin}: {key}: {error}") from None
        values[flag.name] = not value if negated else value
    return values
