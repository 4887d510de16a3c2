"""Planted faults: a copy of a real checkpoint with one fault, or a server with one fault.

Most faults are in the files of a checkpoint in the published layout, so that everything between the file and
the client is what users run::

    folder = plant("sink_left_out", ensure_demo(), tmp_path / "faulty")

``folder`` is an ordinary checkpoint for any engine or server. Faults that a file cannot express are in the
engine's process: ``environment(name)`` returns the environment variables that give Chorale's processes the
fault (on a CPU)::

    with environment_of("stale_page"):  # for servers started in this block
        ...
    subprocess.Popen([...], env=environment("stale_page"))

``FAULTS`` lists the faults by name; the functions below also make them for other layers, experts or sizes.
Layers count from 0: even ones have a sliding window, odd ones full attention.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tests.support import ROOT

Array = npt.NDArray[Any]
VARIABLE = "CHORALE_TEST_FAULT"  # read by tests/support/faulty_engine/sitecustomize.py
HOOKS = ROOT / "tests" / "support" / "faulty_engine"


@dataclass(frozen=True)
class Fault:
    """``config`` edits config.json; ``tensors`` edit tensors in place (uint8, or bfloat16 as float32).

    ``engine``: comma-separated names of faults in the engine's process instead.
    """

    config: Callable[[dict[str, Any]], None] | None = None
    tensors: Mapping[str, Callable[[Array], None]] = field(default_factory=dict)
    engine: str = ""


def layer(number: int, name: str) -> str:
    return f"model.layers.{number}.{name}"


def expert_scale(number: int = 1, expert: int = 0, exponent: int = 1) -> Fault:
    """The scales of one expert's down projection are off by a factor of 2 ** ``exponent``."""

    def edit(scales: Array) -> None:
        scales[expert] = scales[expert].astype(np.int32) + exponent

    return Fault(tensors={layer(number, "mlp.experts.down_proj_scales"): edit})


def sink_left_out(number: int = 1) -> Fault:
    """The attention sinks of one layer have no effect: their logits are so low that their weight is 0."""

    def edit(sinks: Array) -> None:
        sinks[:] = -1e30

    return Fault(tensors={layer(number, "self_attn.sinks"): edit})


def columns_swapped(first: int, second: int, parts: int, number: int = 1) -> Fault:
    """Two of ``parts`` equal parts of the columns of one layer's output projection are exchanged. As many as
    heads: two heads are exchanged."""

    def edit(weight: Array) -> None:
        columns = np.split(weight, parts, axis=1)  # views
        columns[first][:], columns[second][:] = columns[second].copy(), columns[first].copy()

    return Fault(tensors={layer(number, "self_attn.o_proj.weight"): edit})


def bias_dropped(number: int = 1, name: str = "self_attn.v_proj.bias") -> Fault:
    def edit(bias: Array) -> None:
        bias[:] = 0.0

    return Fault(tensors={layer(number, name): edit})


def setting(**values: Any) -> Fault:
    """Keys of config.json have other values. ``rope_scaling={...}`` changes only the given keys in it."""

    def edit(config: dict[str, Any]) -> None:
        for key, value in values.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value

    return Fault(config=edit)


def _window_one_less(config: dict[str, Any]) -> None:
    config["sliding_window"] -= 1


FAULTS: dict[str, Fault] = {
    "expert_scale": expert_scale(),
    "sink_left_out": sink_left_out(),
    "window_one_less": Fault(config=_window_one_less),
    "no_concentration": setting(rope_scaling={"attention_factor": 1.0}),  # of YaRN
    "half_swapped": columns_swapped(0, 1, 2),
    "rank_half_swapped": columns_swapped(2, 3, 4),  # by one of two ranks
    "bias_dropped": bias_dropped(),
    "stale_page": Fault(engine="stale_page"),  # page 4 of each sequence's table is still page 3
    # With these: the norm's epsilon times 10, temperature applied twice, digits cut by two.
    "four_faults": Fault(engine="stale_page,norm_epsilon,temperature_twice,digits_by_two"),
}


def plant(fault: str | Fault, source: Path, folder: Path) -> Path:
    """Copies the checkpoint ``source`` to ``folder`` with the fault in it, and returns ``folder``.

    Files that the fault does not touch are links to the source's.
    """
    chosen = FAULTS[fault] if isinstance(fault, str) else fault
    assert not chosen.engine, "not in a checkpoint, see environment()"
    folder.mkdir(parents=True)
    missing = set(chosen.tensors)
    for file in source.iterdir():
        if not file.is_file() or file.name == "config.json":
            continue
        tensors = load_file(file) if file.suffix == ".safetensors" else {}
        here = missing & tensors.keys()
        for name in here:
            _edit(tensors[name], chosen.tensors[name])
        if here:
            save_file(tensors, folder / file.name)
        else:
            (folder / file.name).symlink_to(file.resolve())
        missing -= here
    assert not missing, f"no such tensors in {source}: {sorted(missing)}"
    config = json.loads((source / "config.json").read_text())
    if chosen.config is not None:
        chosen.config(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _edit(tensor: torch.Tensor, edit: Callable[[Array], None]) -> None:
    values = tensor.numpy() if tensor.dtype == torch.uint8 else tensor.float().numpy()
    before = values.copy()
    edit(values)
    assert not np.array_equal(values, before), "the fault changes nothing"
    tensor.copy_(torch.from_numpy(values))


def environment(fault: str) -> dict[str, str]:
    """Returns this process's environment, plus variables that give Chorale's processes the fault."""
    assert FAULTS[fault].engine, f"{fault}: in a checkpoint, see plant()"
    paths = [str(HOOKS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, VARIABLE: FAULTS[fault].engine, "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def environment_of(fault: str) -> Iterator[None]:
    """Gives the fault to Chorale's processes that are started in the block."""
    before = dict(os.environ)
    os.environ.update(environment(fault))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
