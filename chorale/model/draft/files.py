"""A head's folder: ``config.json`` and safetensors files, whose names, shapes and types are all checked.

Names have two styles: ``layers.0.`` (speculators) and ``midlayer.`` (SpecForge, NVIDIA), both with or without
a leading ``model.``. Faults are ``ConfigError``s that name file and tensor.
"""

from __future__ import annotations

from pathlib import Path

import torch

from chorale.errors import CheckpointError
from chorale.model.checkpoint import open_files
from chorale.model.config import ModelConfig
from chorale.model.config_fields import read_json_object
from chorale.model.draft.config import HeadConfig, tensor_shapes
from chorale.model.draft.parse import read_head_config
from chorale.model.layouts import FLOATS
from chorale.model.safetensors_file import DTYPES, SafetensorsFile

_LAYER = "layers.0."
_BIASED = ("fc.weight", *(f"self_attn.{name}_proj.weight" for name in "qkvo"))  # endings
_MASK = "mask_hidden"
D2T, T2D = "d2t", "t2d"
# Ignored: copies of the target's tensors that some trainers write, and tables that follow from the
# configuration.
_LEFT_OVER = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
_DTYPES = DTYPES | {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
_INTEGERS = frozenset({"I64", "I32"})
_MASKS = frozenset({"BOOL", "U8", "I64", "I32"})


class HeadFiles:
    """Has ``config``, and reads tensors by name (``tensor_shapes``) as views of the mapped files."""

    def __init__(self, folder: Path, target: ModelConfig) -> None:
        """Raises ``ConfigError``."""
        self.folder = folder
        raw = read_json_object(folder / "config.json")
        _refuse_pickles(folder)
        if (folder / "mask_embedding.pt").exists():
            raise CheckpointError(f"{folder / 'mask_embedding.pt'}: a pickle; such heads are not supported")
        self.files, found = open_files(folder, _DTYPES)
        self._where = _canonical(found)
        self.config = read_head_config(raw, str(folder / "config.json"), target, names=self._where.keys())
        self._names = self._checked_names()

    def read(self, name: str) -> torch.Tensor | None:
        """Return a view in the file's dtype, or None if the tensor is missing. It must not be written to."""
        if name not in self._names:
            return None
        tensor = self._tensor(name)
        return tensor.flatten() if name == _MASK else tensor

    def token_ids(self) -> torch.Tensor:
        """[draft V] int64: the target id of each draft id, from the differences in ``d2t``."""
        config = self.config
        if D2T not in self._where:
            return torch.arange(config.draft_vocab_size)
        places = torch.arange(config.draft_vocab_size)
        ids = self._tensor(D2T).long() + places
        file, _ = self._where[D2T]
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
            raise CheckpointError(
                f"{file.path}: {D2T}: an id plus its difference is not from 0 to {config.vocab_size - 1}"
            )
        if len(ids.unique()) != len(ids):
            raise CheckpointError(f"{file.path}: {D2T}: two draft ids are the same target id")
        self._check_mask(ids)
        return ids

    def _check_mask(self, ids: torch.Tensor) -> None:
        if T2D not in self._where:
            return
        mask = self._tensor(T2D).bool()
        if int(mask.sum()) != len(ids) or not bool(mask[ids].all()):
            file, _ = self._where[T2D]
            raise CheckpointError(f"{file.path}: {T2D}: is not the mask of the ids that {D2T} gives")

    def _tensor(self, name: str) -> torch.Tensor:
        file, spelled = self._where[name]
        return file.tensor(spelled)

    def _checked_names(self) -> set[str]:
        """Check all tensors and return the names of those that are there."""
        config = self.config
        optional = {"embed_tokens.weight", "lm_head.weight"}
        if not config.aux_boundaries:
            optional.add(config.state_norm)
        found: set[str] = set()
        for name, shape in tensor_shapes(config).items():
            if name not in self._where and name in optional:
                continue
            self._check(name, shape, FLOATS)
            found.add(name)
            bias = name.removesuffix("weight") + "bias"
            if name.endswith(_BIASED) and bias in self._where:
                self._check(bias, shape[:1], FLOATS)
                found.add(bias)
        self._check_ids()
        self._refuse_others(found | {D2T, T2D})
        return found

    def _check_ids(self) -> None:
        config = self.config
        if D2T in self._where:
            self._check(D2T, (config.draft_vocab_size,), _INTEGERS)
        elif config.draft_vocab_size != config.vocab_size:
            problem = f"missing: draft_vocab_size is {config.draft_vocab_size} of {config.vocab_size}"
            raise CheckpointError(f"{self.folder}: {D2T}: {problem}")
        if T2D in self._where:
            self._check(T2D, (config.vocab_size,), _MASKS)

    def _check(self, name: str, shape: tuple[int, ...], dtypes: frozenset[str]) -> None:
        if name not in self._where:
            raise CheckpointError(f"{self.folder}: {name}: missing")
        file, spelled = self._where[name]
        entry = file.entries[spelled]
        is_row = name == _MASK and set(entry.shape[:-1]) <= {1}  # [1, width], or more ones
        if (entry.shape[-1:] if is_row else entry.shape) != shape:
            problem = f"shape {list(entry.shape)}, config.json says {list(shape)}"
            raise CheckpointError(f"{file.path}: {spelled}: {problem}")
        if entry.dtype not in dtypes:
            problem = f"dtype {entry.dtype}, must be {' or '.join(sorted(dtypes))}"
            raise CheckpointError(f"{file.path}: {spelled}: {problem}")

    def _refuse_others(self, wanted: set[str]) -> None:
        for name, (file, spelled) in self._where.items():
            is_unused = self.config.kind == "peagle" and name.endswith(".hidden_norm.weight")
            if name not in wanted and not name.endswith(_LEFT_OVER) and not is_unused:
                what = {"eagle3": "an EAGLE3", "peagle": "a P-EAGLE", "dflash": "a DFlash"}[self.config.kind]
                raise CheckpointError(f"{file.path}: {spelled}: not a tensor of {what} head{self._why(name)}")

    def _why(self, name: str) -> str:
        config: HeadConfig = self.config
        if name.startswith("layers.") and not name.startswith(_LAYER):
            return " of one layer" if config.num_layers == 1 else f" of {config.num_layers} layers"
        if name.startswith(("fc.", "input_norm.", "fc_norm.")) and not config.aux_boundaries:
            return " without aux states (use_aux_hidden_state is false)"
        return ""


def _canonical(found: dict[str, SafetensorsFile]) -> dict[str, tuple[SafetensorsFile, str]]:
    """Return name as in ``tensor_shapes`` -> (file, name in the file)."""
    where: dict[str, tuple[SafetensorsFile, str]] = {}
    for spelled, file in found.items():
        name = spelled.removeprefix("model.")
        if name.startswith("midlayer."):
            name = _LAYER + name.removeprefix("midlayer.")
        if name in where:
            raise CheckpointError(f"{file.path}: {spelled}: is also called {where[name][1]}")
        where[name] = file, spelled
    return where


def _refuse_pickles(folder: Path) -> None:
    """Raises ``CheckpointError`` for a folder without safetensors files."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]}: a pickle, which can run code when it is opened; "
            "convert it to safetensors (safetensors.torch.save_file)"
        )
    raise CheckpointError(f"{folder}: holds no safetensors file")
