"""A checkpoint folder: its files, its layout, and checks of every tensor.

Opening checks everything that can be checked without reading weights: the index, each file's header, and
each tensor's presence, shape and dtype against the layout's table. Faults are ``CheckpointError``s that name
file and tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from chorale.errors import CheckpointError
from chorale.model.config import ModelConfig
from chorale.model.config_fields import read_json
from chorale.model.layouts import Layout, TensorSpec, detect_layout, kv_scale_specs, tensor_specs
from chorale.model.safetensors_file import DTYPES, SafetensorsFile, check_name

INDEX_NAME = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 16 * 2**20
_SAMPLE_BYTES = 1024


class Checkpoint:
    """Gives access to tensors by layer and role. ``read`` returns views of the mapped files."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.folder = weights_folder(folder)
        self.files, where = open_files(self.folder)
        layout = detect_layout(where)
        if layout is None:
            raise CheckpointError(f"{self.folder}: no gpt-oss expert tensors in its safetensors files")
        self.layout: Layout = layout
        specs = list(tensor_specs(config, layout))
        specs += [spec for spec in kv_scale_specs(config) if spec.name in where]
        _check_names(self.folder, specs, where)
        for spec in specs:
            _check_tensor(where[spec.name], spec)
        self.num_layers = config.num_hidden_layers
        self._tensors = {(spec.layer, spec.role): (where[spec.name], spec.name) for spec in specs}
        self._specs = {(spec.layer, spec.role): spec for spec in specs}

    def has(self, layer: int | None, role: str) -> bool:
        return (layer, role) in self._tensors

    def read(self, layer: int | None, role: str) -> torch.Tensor:
        """Return a view of the mapped file in the file's dtype. It must not be written to."""
        file, name = self._tensors[layer, role]
        return file.tensor(name)

    def locate(self, layer: int | None, role: str) -> tuple[SafetensorsFile, str]:
        """Return the file that has a tensor, and the tensor's name in it."""
        return self._tensors[layer, role]

    def spec(self, layer: int | None, role: str) -> TensorSpec:
        return self._specs[layer, role]

    def specs(self, layer: int | None) -> list[TensorSpec]:
        return [spec for spec in self._specs.values() if spec.layer == layer]

    @property
    def num_bytes(self) -> int:
        return sum(entry.end - entry.begin for file in self.files for entry in file.entries.values())

    def kv_scale(self, layer: int, role: str) -> float:
        """Return the power of two at or above a layer's ``k_scale`` or ``v_scale``; 1 without one."""
        if not self.has(layer, role):
            return 1.0
        value = float(self.read(layer, role).float())
        if not 2.0**-64 <= value <= 2.0**64:
            raise CheckpointError(f"{self.folder}: {self.spec(layer, role).name}: {value} is not a scale")
        return 2.0 ** math.ceil(math.log2(value))


def with_kv_scales(folder: Path, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the checkpoint's scales of an e4m3 KV cache, if it has any.

    They are rounded up to powers of two, so that the weights of the projections can apply them without an
    error (``ModelConfig.kv_factor``), and no kernel has to know them. Nothing more saturates, because values
    become smaller, and e4m3 is a floating-point type, so its relative error stays.
    """
    if not config.layer_experts:  # only gpt_oss_puzzle has them
        return config
    checkpoint = Checkpoint(folder, config)
    scales = tuple(
        (checkpoint.kv_scale(layer, "k_scale"), checkpoint.kv_scale(layer, "v_scale"))
        for layer in range(config.num_hidden_layers)
    )
    for file in checkpoint.files:
        file.release()
    return replace(config, kv_scales=scales)


def digest_weights(folder: Path) -> bytes:
    """Return a hash of config.json and of a sample of each tensor.

    A fine-tune changes nearly all bytes of the tensors that it touches, so a sample finds it.
    """
    files, where = open_files(weights_folder(folder))
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for name, file in sorted(where.items()):
        found.update(f"\n{name} {file.entries[name]}\n".encode() + file.sample(name, _SAMPLE_BYTES))
    for file in files:
        file.release()
    return found.digest()


def weights_folder(folder: Path) -> Path:
    """Return the folder, or its ``original/`` if the folder has no safetensors files."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    for candidate in (folder, folder / "original"):
        if candidate.is_dir() and any(candidate.glob("*.safetensors")):
            return candidate
    raise CheckpointError(f"{folder}: holds no safetensors file")


def open_files(
    folder: Path, dtypes: Mapping[str, torch.dtype] = DTYPES
) -> tuple[list[SafetensorsFile], dict[str, SafetensorsFile]]:
    """Return (files, tensor name -> file). With an index, its files; else every safetensors file."""
    index = folder / INDEX_NAME
    listed = _read_index(index) if index.exists() else None
    names = sorted(set(listed.values())) if listed else sorted(p.name for p in folder.glob("*.safetensors"))
    files: list[SafetensorsFile] = []
    where: dict[str, SafetensorsFile] = {}
    for name in names:
        if not (folder / name).is_file():
            problem = f"named by {INDEX_NAME} but missing" if listed else "not a file, or a broken link"
            raise CheckpointError(f"{folder / name}: {problem}")
        file = SafetensorsFile(folder / name, dtypes)
        files.append(file)
        for tensor in file.entries:
            if tensor in where:
                raise CheckpointError(f"{file.path}: {tensor}: also in {where[tensor].path.name}")
            where[tensor] = file
    for tensor, name in (listed or {}).items():
        if tensor not in where or where[tensor].path.name != name:
            raise CheckpointError(f"{folder / name}: {tensor}: listed in {INDEX_NAME}, missing in the file")
    return files, where


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor -> file name. Names must be plain: an index must not point outside its folder."""
    raw = read_json(path, _MAX_INDEX_BYTES, CheckpointError)
    listed = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path}: weight_map: missing or empty")
    for tensor, name in listed.items():
        check_name(path, tensor)
        if not isinstance(name, str) or not _is_plain(name):
            raise CheckpointError(f"{path}: {tensor}: {str(name)[:80]!r} is not a safetensors file name")
    return listed


def _is_plain(name: str) -> bool:
    """Returns whether ``name`` is a plain file name. File systems allow up to 255 bytes."""
    fits = name.isprintable() and len(name.encode()) <= 255
    return fits and Path(name).name == name and name.endswith(".safetensors")


def _check_names(folder: Path, specs: list[TensorSpec], where: dict[str, SafetensorsFile]) -> None:
    wanted = {spec.name for spec in specs}
    missing = [spec.name for spec in specs if spec.name not in where]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder}: {missing[0]}: missing{more}")
    extra = [(file.path, name) for name, file in where.items() if name not in wanted]
    if extra:
        path, name = extra[0]
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise CheckpointError(f"{path}: {name}: not a tensor of this model{more}")


def _check_tensor(file: SafetensorsFile, spec: TensorSpec) -> None:
    entry = file.entries[spec.name]
    check_shape(str(file.path), spec, entry.dtype, entry.shape)


def check_shape(where: str, spec: TensorSpec, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise ``CheckpointError`` unless a tensor has the shape and a type (a name of safetensors) of its
    spec."""
    is_number = spec.shape == () and shape == (1,)  # both forms occur
    if shape != spec.shape and not is_number:
        problem = f"shape {list(shape)}, config.json says {list(spec.shape)}"
        raise CheckpointError(f"{where}: {spec.name}: {problem}")
    if dtype not in spec.dtypes:
        problem = f"dtype {dtype}, must be {' or '.join(sorted(spec.dtypes))}"
        raise CheckpointError(f"{where}: {spec.name}: {problem}")
