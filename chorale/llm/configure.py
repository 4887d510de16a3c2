"""Reads the arguments of ``LLM`` into an EngineConfig, with vLLM's other names and unused arguments."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from chorale.config.engine import MOST_ENGINES, EngineConfig
from chorale.config.kv_events import KvEventsConfig
from chorale.config.options.flags import FLAGS
from chorale.config.options.values import Flag, check_bounds
from chorale.config.profiler import ProfilerConfig
from chorale.config.read_objects import convert, read_kv_events, read_profiler, read_weight_transfer
from chorale.config.read_speculative import read_speculative
from chorale.config.sampling_fields import GENERATION
from chorale.config.speculative import SpeculativeConfig
from chorale.config.weight_transfer import WeightTransferConfig
from chorale.errors import ConfigError
from chorale.llm.options import as_arguments
from chorale.llm.params import SamplingParams, check_names

logger = logging.getLogger(__name__)

_FLAGS = {name: flag for name, flag in FLAGS.items() if flag.target is None}  # arguments without effect
_LOG_STATS = "LLM logs no statistics; get_metrics() always works"
_FLAGS["disable-log-stats"] = Flag("disable-log-stats", "bool", note=_LOG_STATS)


def engine_config(model: str | os.PathLike[str], options: dict[str, Any], count: int) -> EngineConfig:
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in [name for name in options if name not in names]:
        if _has_no_effect(name, options[name]):
            del options[name]
    _rename_options(options)
    check_names("LLM", options, names)
    given = {name: value for name, value in options.items() if value is not None}  # None: default
    caching = given.get("enable_prefix_caching") is not False
    readers: dict[str, tuple[type, Callable[[Any, str], Any]]] = {
        "speculative_config": (SpeculativeConfig, _speculative),
        "kv_events_config": (KvEventsConfig, partial(_kv_events, caching=caching, count=count)),
        "profiler_config": (ProfilerConfig, read_profiler),
        "weight_transfer_config": (WeightTransferConfig, read_weight_transfer),
    }
    for name, (kind, read) in readers.items():
        if name in given and not isinstance(given[name], kind):
            given[name] = read(given[name], f"LLM: {name}")
    given.setdefault("prompt_delay", 0.0)  # without streams, prefill may delay running rows
    config = convert({"model": os.fspath(model), **given}, EngineConfig, "LLM", strict=True)
    for flag in FLAGS.values():
        room, _, name = (flag.target or "").partition(".")
        if room == "engine" and name in given:
            check_bounds(flag, given[name])
    override = config.override_generation_config or {}
    check_names("override_generation_config", override, list(GENERATION))
    SamplingParams.from_defaults(override)  # raises for values that are out of range
    return config


def _has_no_effect(name: str, value: Any) -> bool:
    """Return whether an argument has no effect, after a warning if it asks for something. Raises
    ``ConfigError`` if what it asks for is refused. The table is that of the server's flags."""
    flag = _FLAGS.get(name.replace("_", "-"))
    if flag is not None and flag.asks(value):
        reason = as_arguments(flag.note)
        if flag.effect == "refused":
            raise ConfigError(f"LLM: {name} is not supported: {reason}")
        logger.warning("LLM: %s has no effect: %s", name, reason)
    return flag is not None


def _rename_options(options: dict[str, Any]) -> None:
    """Replace vLLM's ``spec_*``, ``swap_space`` and ``kv_offloading_backend`` by Chorale's names."""
    short = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
    given = {short[name]: options.pop(name) for name in short if name in options}
    if any(value is not None for value in given.values()):
        options["speculative_config"] = {**(options.get("speculative_config") or {}), **given}
    backend, size = options.pop("kv_offloading_backend", None), options.pop("swap_space", None)
    if backend not in (None, "native"):
        raise ConfigError(f"LLM: kv_offloading_backend={backend!r}: the only backend is native")
    if size is not None and options.get("kv_offloading_size") is None:
        options["kv_offloading_size"] = size


def _speculative(given: Any, shown: str) -> SpeculativeConfig:
    config, notices = read_speculative(given, shown)
    for notice in notices:
        logger.warning("%s", notice)
    if config.is_synthetic:
        logger.warning(
            "SYNTHETIC ACCEPTANCE: draft tokens are accepted by a profile; the output has no meaning"
        )
    return config


def _kv_events(given: Any, shown: str, *, caching: bool, count: int) -> KvEventsConfig:
    config = read_kv_events(given, shown, count)
    reason = config.why_silent(caching)
    if reason:
        logger.warning("%s publishes nothing: %s", shown, reason)
    return config


def count_of_engines(size: Any) -> int:
    if size is None:
        return 1
    if not isinstance(size, int) or not 1 <= size <= MOST_ENGINES:
        raise ConfigError(f"LLM: data_parallel_size={size!r}: must be an integer, 1 to {MOST_ENGINES}")
    return int(size)
