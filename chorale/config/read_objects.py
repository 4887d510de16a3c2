"""Readers of the options whose values are JSON objects, into the types that declare their keys."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec

from chorale.config.adapters import LoraModule, is_name
from chorale.config.kv_events import KvEventsConfig, endpoint_of
from chorale.config.profiler import ProfilerConfig
from chorale.config.suggestions import nearest
from chorale.config.weight_transfer import WeightTransferConfig
from chorale.errors import ConfigError

T = TypeVar("T")
_LORA = "--lora-modules"


def read_object(given: Any, kind: type[T], shown: str, example: str) -> T:
    """Returns ``given`` as a ``kind``. Keys that are null have their defaults.

    ``shown``: the option's name in messages. Raises ``ConfigError`` for another type than an object, an
    unknown key, and a value that its field does not allow.
    """
    return convert(known_keys(given, get_type_hints(kind), shown, example), kind, shown)


def known_keys(given: Any, known: Collection[str], shown: str, example: str) -> dict[str, Any]:
    """Returns the keys that have a value. Raises ``ConfigError`` for an unknown one, naming the nearest."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{shown}: must be a JSON object, such as {example}")
    for name in map(str, given):
        if name not in known:
            raise ConfigError(f"{shown}: unknown key {name!r}{nearest(name, known)}")
    return {name: value for name, value in given.items() if value is not None}


def convert(values: Mapping[str, Any], kind: type[T], shown: str, *, strict: bool = False) -> T:
    """Returns ``values`` as a ``kind``. Raises ``ConfigError``, which names the key whose value is wrong.

    Unless ``strict``, "4" is a number, as in vLLM.
    """
    try:
        return msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{shown}: {_explained(error, kind)}") from None


def _explained(error: msgspec.ValidationError, kind: type) -> str:
    reason, _, path = str(error).partition(" - at `$.")
    name = path.rstrip("`")
    choices = [each for each in get_args(get_type_hints(kind).get(name)) if isinstance(each, str)]
    one_of = f"; one of {', '.join(choices)}" if choices else ""
    return f"{name}: {reason}{one_of}" if name else reason


def read_kv_events(given: Any, shown: str, replicas: int = 1) -> KvEventsConfig:
    """Returns the config. ``shown``: the option's name in messages. ``replicas``: engines that publish.

    Raises ``ConfigError`` for an unknown key, naming the nearest, and for a value that cannot work.
    """
    config = read_object(given, KvEventsConfig, shown, '{"enable_kv_cache_events": true}')
    try:
        _check_endpoints(config, replicas)
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}") from None
    return config


def _check_endpoints(config: KvEventsConfig, replicas: int) -> None:
    """Raises ``ValueError`` for an address that is malformed, or that two sockets would share."""
    used: dict[str, str] = {}
    for name, endpoint in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
        if endpoint is None:
            continue
        for replica in range(replicas):
            own = endpoint_of(endpoint, replica, name)
            key = own.rpartition(":")[2] if own.startswith("tcp:") else own
            if (name != "endpoint" or config.bind is not False) and key in used:
                whose = f" of replica {replica}" if replicas > 1 else ""
                raise ValueError(f"{name} {own}{whose} is already used by {used[key]}; choose another port")
            used[key] = f"{name} (replica {replica})" if replicas > 1 else name


def read_profiler(given: Any, shown: str) -> ProfilerConfig | None:
    """Returns the config, or None if no profiler is chosen. ``shown``: the option's name in messages.

    Raises ``ConfigError`` for a key or value that is not supported, and for a folder that cannot be written.
    """
    if isinstance(given, dict) and given.get("profiler") is None:
        return None
    config = read_object(given, ProfilerConfig, shown, '{"profiler": "torch", "torch_profiler_dir": "/tmp"}')
    folder = Path(config.torch_profiler_dir)
    try:
        if folder.is_absolute():
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{shown}: {error}") from None
    if not folder.is_absolute() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{shown}: torch_profiler_dir must be the absolute path of a folder to write to")
    return config


def read_weight_transfer(given: Any, shown: str) -> WeightTransferConfig:
    """Returns the config. ``shown``: the option's name in messages. Raises ``ConfigError``."""
    config = read_object(given, WeightTransferConfig, shown, '{"backend": "nccl"}')
    if config.backend == "checkpoint" and not config.allowed_folders:
        raise ConfigError(f"{shown}: backend checkpoint needs allowed_folders, from which weights are read")
    return config


def read_modules(items: Iterable[str]) -> tuple[LoraModule, ...]:
    """Parses NAME=PATH, and JSON objects with name, path and base_model_name, or lists of these.

    Raises ``ConfigError``.
    """
    found = tuple(module for item in items for module in _read(item.strip()))
    names = [module.name for module in found]
    for name in names:
        if not is_name(name):
            raise ConfigError(f"{_LORA}: {name[:80]!r} cannot be the name of a model")
        if names.count(name) > 1:
            raise ConfigError(f"{_LORA}: the name {name!r} appears twice")
    return found


def _read(item: str) -> list[LoraModule]:
    if item.startswith(("{", "[")):
        try:
            given = json.loads(item)
        except ValueError as fault:
            raise ConfigError(f"{_LORA}: {item[:80]!r} is not JSON: {fault}") from fault
        return [_from_object(each) for each in (given if isinstance(given, list) else [given])]
    name, equals, path = item.partition("=")
    if not equals or not path:
        raise ConfigError(f"{_LORA}: {item[:80]!r} is neither NAME=PATH nor a JSON object")
    return [LoraModule(name, path)]


class _Module(msgspec.Struct):
    name: str
    path: Annotated[str, msgspec.Meta(min_length=1)]
    base_model_name: str | None = None
    is_3d_lora_weight: bool | None = None  # no effect: the files show it


def _from_object(given: Any) -> LoraModule:
    read = read_object(given, _Module, _LORA, '{"name": "mine", "path": "/adapters/mine"}')
    return LoraModule(read.name, read.path, read.base_model_name)
