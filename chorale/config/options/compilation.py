"""``--compilation-config`` and ``-O``. They control CUDA graphs only: there is no torch.compile stage.

Chorale captures a decode step as one graph, sampling included, and the model of a mixed step of up to 1,536
tokens as one graph, with sampling after it. It never splits a graph into pieces. vLLM's graph modes are
mapped to these two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.errors import ConfigError

# mode -> (decode steps are captured, small mixed steps are captured)
MODES = {
    "NONE": (False, False),
    "PIECEWISE": (True, True),
    "FULL": (True, True),
    "FULL_DECODE_ONLY": (True, False),
    "FULL_AND_PIECEWISE": (True, True),
}
NUMBERED = ("NONE", "PIECEWISE", "FULL")  # vLLM's integers for the first three
LEVELS = {0: "NONE", 1: "PIECEWISE", 2: "FULL_AND_PIECEWISE", 3: "FULL_AND_PIECEWISE"}  # levels of -O
ACTING = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
_NOT_SO = {
    "PIECEWISE": "graphs are not split into pieces; decode steps are captured whole (NONE turns graphs off)",
    "FULL": "same as FULL_AND_PIECEWISE: decode steps are captured whole, small mixed steps without sampling",
}


def read_compilation(given: Any) -> dict[str, Any]:
    """Returns the keys of ``--compilation-config`` that have an effect. An integer is vLLM's older form of
    ``mode``.

    Raises ``ConfigError`` for other types, and for invalid values of these keys.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        given = {"mode": given}
    if not isinstance(given, Mapping):
        raise ConfigError("--compilation-config: must be a JSON object, or an integer from 0 to 3")
    mode = given.get("mode", given.get("level"))
    if isinstance(mode, int) and not 0 <= mode <= 3:
        raise ConfigError(f"--compilation-config: mode {mode} is not an integer from 0 to 3")
    found = {name: given[name] for name in ACTING if given.get(name) is not None}
    if "cudagraph_mode" in found:
        found["cudagraph_mode"] = _mode(found["cudagraph_mode"])
    if "cudagraph_capture_sizes" in found:
        sizes = found["cudagraph_capture_sizes"]
        if not (isinstance(sizes, list) and sizes and all(_is_count(size, 1) for size in sizes)):
            raise ConfigError(
                "--compilation-config: cudagraph_capture_sizes must be a list of integers, such as [1, 2, 4]"
            )
        found["cudagraph_capture_sizes"] = tuple(sizes)
    most = found.get("max_cudagraph_capture_size")
    if most is not None and not _is_count(most, 0):
        raise ConfigError("--compilation-config: max_cudagraph_capture_size must be a non-negative integer")
    return found


def _mode(given: Any) -> str:
    if _is_count(given, 0) and given < len(NUMBERED):
        return NUMBERED[given]
    if isinstance(given, str) and given.upper() in MODES:
        return given.upper()
    raise ConfigError(f"--compilation-config: cudagraph_mode {given!r} is not one of {', '.join(MODES)}")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def notice(given: Any, shown: str) -> str | None:
    """Returns a notice about parts that act differently or not at all, or None if all act as in vLLM."""
    found = read_compilation(given)
    idle = [name for name in given if name not in ACTING] if isinstance(given, Mapping) else ["mode"]
    if idle:
        what = ", ".join(map(str, idle))
        return f"{shown} is accepted and not needed for {what}: there is no torch.compile stage to configure"
    mode = found.get("cudagraph_mode")
    return f"{shown} is accepted and handled differently: {_NOT_SO[mode]}" if mode in _NOT_SO else None


def level_notice(level: int, shown: str) -> str:
    if level == 0:
        return f"{shown} is accepted and turns CUDA graphs off; there is no torch.compile stage"
    return f"{shown} is accepted and not needed: there is no torch.compile stage, and graphs are on"
