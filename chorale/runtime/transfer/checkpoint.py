"""Back end checkpoint: weights from a folder or a file that the sender has written, for CPUs and for storage
that all engines mount."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from chorale.errors import invalid
from chorale.model.checkpoint import open_files, weights_folder
from chorale.model.device_reader import read_fully
from chorale.model.safetensors_file import DTYPES, SafetensorsFile
from chorale.runtime.transfer.base import Check


class CheckpointBackend:
    """Reads files below some folders."""

    def __init__(self, allowed_folders: tuple[str, ...]) -> None:
        self._allowed = [Path(folder).resolve() for folder in allowed_folders]

    def init(self, info: dict[str, Any]) -> None:
        if info:
            raise invalid("init_info", "must be empty for the backend checkpoint")

    def receive(self, info: dict[str, Any], check: Check) -> Iterator[tuple[str, torch.Tensor]]:
        if set(info) != {"path"} or not isinstance(info["path"], str):
            raise invalid(
                "update_info", 'must be {"path": a folder with safetensors files, or one such file}'
            )
        path = self._below(Path(info["path"]))
        files = open_files(weights_folder(path))[0] if path.is_dir() else [SafetensorsFile(path)]
        for file in files:
            self._below(file.path)
            for name, entry in file.entries.items():
                check(name, DTYPES[entry.dtype], list(entry.shape))
        for file in files:
            with file.path.open("rb", buffering=0) as stream:
                for name in file.entries:
                    yield name, _read(file, name, stream.fileno())

    def ended(self) -> None: ...

    close = ended

    def _below(self, path: Path) -> Path:
        """Return the path with links resolved, if it is below an allowed folder."""
        real = path.resolve()
        if not path.is_absolute() or not any(real.is_relative_to(folder) for folder in self._allowed):
            raise invalid("update_info", "path is not below a folder of allowed_folders")
        if not real.exists():
            raise invalid("update_info", "path does not exist")
        return real


def _read(file: SafetensorsFile, name: str, descriptor: int) -> torch.Tensor:
    """Read a tensor to memory of its own: the file may change after the update, and a map of a file that
    became shorter would end this process."""
    entry, (begin, end) = file.entries[name], file.span(name)
    octets = torch.empty(end - begin, dtype=torch.uint8)
    read_fully(descriptor, octets.numpy().data, begin, file.path)
    return octets.view(DTYPES[entry.dtype]).view(entry.shape)
