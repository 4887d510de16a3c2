"""Expands the small archive in the wheel to an ordinary checkpoint folder in the published layout.

The archive holds the layers unchanged, and the two vocabulary tables as factors: ``features @ w`` plus int8
correction rows (see ``training/export.py`` in the repository). The expanded folder is a plain gpt-oss
checkpoint that other engines load.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from chorale.errors import CheckpointError, install_hint
from chorale.harmony.vocab import VOCAB_SIZE, load_vocabulary
from chorale.model.config_writer import GENERATION_CONFIG, config_json
from chorale.model.demo.features import FloatArray, Parts, feature_parts
from chorale.model.demo.shape import demo_config

# A model this small misspells at temperature 1, gpt-oss's default, which requests may still set. It also does
# not always stop; its useful answers have far less than 512 tokens.
SAMPLING = {"temperature": 0.3, "max_new_tokens": 512}
_SIDES = {"embed": "model.embed_tokens.weight", "unembed": "lm_head.weight"}
_ROWS_AT_ONCE = 4096  # rows of 512 float32, which stay in the cache


def check_hash(archive: Path, sha256: str) -> None:
    """Raises ``CheckpointError`` naming both hashes if the archive is not the expected one."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise CheckpointError(
            f"{archive}: sha256 is {found}, expected {sha256}; install anew: {install_hint()}"
        )


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors. Raises ``OSError`` for a full disk, for which safetensors has a separate exception."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None


def expand(archive: Path, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors into ``folder`` (config.json last)."""
    tensors = load_file(archive)
    published = {name: tensor for name, tensor in tensors.items() if not name.startswith("demo.")}
    vocab = load_vocabulary()
    parts = feature_parts([vocab.token_bytes(i) for i in range(VOCAB_SIZE)])
    published |= zip(_SIDES.values(), tables(parts, tensors), strict=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(published, folder / "model.safetensors")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG | SAMPLING, indent=1))
    (folder / "config.json").write_text(json.dumps(config_json(demo_config(), "published"), indent=1))


def tables(parts: Parts, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return embedding and unembedding, [V, H] bfloat16, from features rounded as in training."""
    weights = torch.cat([tensors[f"demo.{side}_w"].float() for side in _SIDES], dim=1)  # [F, 2 H]
    of_core = torch.empty(len(parts.of_core), weights.shape[1])
    core_weights = weights[torch.from_numpy(parts.columns_of_core)]
    for start in range(0, len(of_core), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        torch.mm(_rounded(parts.of_core[rows]), core_weights, out=of_core[rows])
    of_own = weights[torch.from_numpy(parts.columns_own)]
    pieces = _rounded(parts.of_piece)
    of_pieces = [pieces @ weights[torch.from_numpy(columns)] for columns in parts.columns_of_piece]
    piece_ids = torch.from_numpy(parts.piece_ids)
    core_ids, hidden = torch.from_numpy(parts.core_ids), weights.shape[1] // 2
    made = [torch.empty(len(core_ids), hidden, dtype=torch.bfloat16) for _ in _SIDES]
    for start in range(0, len(core_ids), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        sums = torch.addmm(of_core.index_select(0, core_ids[rows]), _rounded(parts.own[rows]), of_own)
        for ids, of_piece in zip(piece_ids, of_pieces, strict=True):
            sums += of_piece.index_select(0, ids[rows])
        for out, part in zip(made, sums.split(hidden, dim=1), strict=True):
            out[rows] = part
    for side, out in zip(_SIDES, made, strict=True):
        corrections = tensors[f"demo.{side}_d"].float() * tensors[f"demo.{side}_d_scale"].unsqueeze(-1)
        out.index_add_(0, tensors["demo.corrected"].long(), corrections.bfloat16())
    return made


def _rounded(piece: FloatArray) -> torch.Tensor:
    return torch.from_numpy(piece).bfloat16().float()
