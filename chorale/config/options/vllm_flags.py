"""vLLM's names: how each flag, variable and benchmark option is treated here, read from ``vllm_names.txt``.

The treatments are *acts*, *not needed* (Chorale always works that way), *no effect* (not supported, but the
server works without it), and *refused* (the server would not do what was requested). A flag that does not
act produces one line for the operator, unless its value requests nothing. ``scripts/vllm_names.py`` adds the
names of a new version of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

from chorale.config.options.values import Effect, Flag, Kind

NAMES = Path(__file__).with_name("vllm_names.txt")


class Name(NamedTuple):
    """A line of the file. ``form``: words, explained at the top of the file."""

    kind: str  # "flag", "env", "endpoint", "bench serve" ...
    name: str  # without leading dashes; a variable's may end in * (all names that begin so)
    form: str
    treatment: str
    reason: str

    @property
    def harmless(self) -> tuple[str, ...]:
        """The values that request nothing."""
        texts = (word[9:] for word in self.form.split() if word.startswith("harmless="))
        return next((tuple(text.split(",")) for text in texts), ())

    def asks(self, value: str) -> bool:
        """Returns whether a variable's value gives a notice."""
        silent = self.treatment == "acts" or "silent" in self.form.split()
        return not silent and value not in self.harmless


def read_names(*kinds: str) -> list[Name]:
    """Returns the lines of some kinds, or all lines, in the file's order."""
    starts = tuple(f"{kind} |" for kind in kinds) or ""
    lines = NAMES.read_text("utf-8").splitlines()
    found = (line for line in lines if line.startswith(starts) and not line.startswith("#"))
    return [Name(*(part.strip() for part in line.split("|", 4))) for line in found]


def flag_of(line: Name) -> Flag:
    """Returns the flag without effect that a line describes. Any single value is accepted, as text."""
    kind, *words = line.form.split()
    return Flag(
        line.name,
        cast(Kind, kind if kind in ("bool", "json", "list", "optional") else "str"),
        effect=cast(Effect, line.treatment),
        note=line.reason,
        harmless=line.harmless,
        always="always" in words,
    )


_LINES = read_names("flag")
KNOWN_FLAGS: tuple[Flag, ...] = tuple(flag_of(line) for line in _LINES if line.treatment != "acts")
# Short options, also of flags that act; -cc.pass_config.x=true is a part of a JSON value.
SHORT_FLAGS = {word: line.name for line in _LINES for word in line.form.split() if word.startswith("-")}

# Other devices and their state of support.
_UNSUPPORTED = "there is no back end for {}; use --device cpu"
DEVICES = {
    **dict.fromkeys(("hip", "amd"), "for AMD GPUs, use --device rocm"),
    "ascend": "for Ascend NPUs, use --device npu",
    **dict.fromkeys(("xpu", "intel"), _UNSUPPORTED.format("Intel GPUs")),
    **dict.fromkeys(("mps", "metal"), _UNSUPPORTED.format("Apple GPUs")),
    "tpu": _UNSUPPORTED.format("TPUs"),
    "hpu": _UNSUPPORTED.format("Gaudi"),
    "neuron": _UNSUPPORTED.format("Neuron"),
    "gpu": "for NVIDIA GPUs, use --device cuda",
}


def line_for(name: str, lines: Mapping[str, Name]) -> Name | None:
    """Returns the line of a variable, else that of the longest prefix of it (``VLLM_ROCM*``), or None.

    ``lines``: by their names.
    """
    prefixes = (f"{name[:size]}*" for size in range(len(name), 3, -1))
    return lines.get(name) or next((lines[prefix] for prefix in prefixes if prefix in lines), None)
