"""What acts in ``--compilation-config`` and ``-O``: CUDA graphs. There is no torch.compile stage.

vLLM's modes of graphs against what Chorale captures: a decode step is one graph, sampling included; a mixed
step of up to 1,024 tokens is one graph of the model, and its sampling is launched after it; no graph is cut
into pieces.
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
LEVELS = {0: "NONE", 1: "PIECEWISE", 2: "FULL_AND_PIECEWISE", 3: "FULL_AND_PIECEWISE"}  # of -O
ACTING = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
_NOT_SO = {
    "PIECEWISE": "graphs are not cut into pieces: decode steps are captured whole (NONE turns graphs off)",
    "FULL": "as FULL_AND_PIECEWISE: decode steps whole, small mixed steps without their sampling",
}


def read_compilation(given: Any) -> dict[str, Any]:
    """``--compilation-config`` as an object. An integer is vLLM's older form of its ``mode``.

    Raises ``ConfigError`` for what is neither, and for values of the acting keys that mean nothing.
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
    sizes = found.get("cudagraph_capture_sizes")
    if sizes is not None and not (
        isinstance(sizes, list) and all(_is_count(size, 1) for size in sizes) and sizes
    ):
        raise ConfigError(
            "--compilation-config: cudagraph_capture_sizes must be a list of integers, such as [1, 2, 4]"
        )
    most = found.get("max_cudagraph_capture_size")
    if most is not None and not _is_count(most, 0):
        raise ConfigError("--compilation-config: max_cudagraph_capture_size must be an integer from 0 up")
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
    """The line about what does nothing in it, or less than it says; None if all of it acts."""
    found = read_compilation(given)
    idle = [name for name in given if name not in ACTING] if isinstance(given, Mapping) else ["mode"]
    if idle:
        what = ", ".join(map(str, idle))
        return f"{shown} is accepted and not needed for {what}: there is no torch.compile stage to configure"
    mode = found.get("cudagraph_mode")
    return f"{shown} is accepted and acts otherwise: {_NOT_SO[mode]}" if mode in _NOT_SO else None


def level_notice(level: int, shown: str) -> str:
    if level == 0:
        return f"{shown} is accepted and turns CUDA graphs off; there is no torch.compile stage"
    return f"{shown} is accepted and not needed: there is no torch.compile stage, and graphs are on"
