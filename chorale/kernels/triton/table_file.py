"""The file of a table of measured shapes: ``chorale bench tune`` writes it, ``--kernel-tuning`` reads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chorale.errors import ConfigError
from chorale.kernels.triton import table
from chorale.kernels.triton.tuning import GemvConfig, PrefillTile, SkinnyConfig, Tile

FORMAT = 1
KINDS: dict[str, type] = {
    "gemv_gate_up": GemvConfig,
    "gemv_down": GemvConfig,
    "skinny_qkv": SkinnyConfig,
    "skinny_output": SkinnyConfig,
    "skinny": Tile,
    "skinny_head": Tile,
    "decode": Tile,
    "decode_few_window": Tile,
    "prefill": PrefillTile,
    "prefill_window": PrefillTile,
}
OF_STEPS = ("gemv_gate_up", "gemv_down", "skinny_qkv", "skinny_output")  # by tokens; others by architecture


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest shape found; None: that of ``tuning.py``. ``tokens``: up to which it is used; 0: always."""

    name: str
    tokens: int
    experts: int
    shape: Any
    us: float
    before_us: float  # of the shape in ``tuning.py``
    tried: int


def table_of(choices: Sequence[Choice], digest: str = "") -> table.Table:
    steps: dict[tuple[str, int], tuple[tuple[int, Any], ...]] = {}
    for each in sorted(choices, key=lambda each: each.tokens):
        if each.name in OF_STEPS:
            key = each.name, each.experts
            steps[key] = (*steps.get(key, ()), (each.tokens, each.shape))
    fields = {each.name: each.shape for each in choices if each.name not in OF_STEPS}
    return table.Table(fields, steps, digest)


def write(path: Path, choices: Sequence[Choice], facts: dict[str, Any]) -> None:
    """``facts``: what else the file says, "architecture" among them."""
    body = {"format": FORMAT, **facts, "shapes": [asdict(each) for each in choices]}
    path.write_text(json.dumps(body, indent=1) + "\n", "utf-8")


def read(path: Path, architecture: str) -> list[Choice]:
    """Returns the choices of a file. Raises ``ConfigError`` if it cannot be read, or is of other GPUs."""
    return _read(path, architecture)[0]


def install(path: str, architecture: str) -> None:
    """Uses the table in a file. Raises ``ConfigError`` if it cannot be read, or is of other GPUs."""
    choices, digest = _read(Path(path), architecture)
    table.use(table_of(choices, digest))


def _read(path: Path, architecture: str) -> tuple[list[Choice], str]:
    try:
        text = path.read_text("utf-8")
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise ConfigError(
                f"--kernel-tuning {path}: has format {body['format']}; this release reads {FORMAT}"
            )
        choices = [Choice(**entry | {"shape": _shape(**entry)}) for entry in body["shapes"]]
        measured_on = body["architecture"]
    except OSError as error:
        raise ConfigError(f"--kernel-tuning {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--kernel-tuning {path}: not a table of chorale bench tune: {error}") from None
    if measured_on != architecture:
        here = architecture or "no GPU"
        raise ConfigError(f"--kernel-tuning {path}: was measured on {measured_on or 'a CPU'}; here is {here}")
    return choices, hashlib.sha256(text.encode()).hexdigest()


def _shape(*, name: str, shape: dict[str, Any] | None, **_: Any) -> Any | None:
    return None if shape is None else KINDS[name](**shape)
