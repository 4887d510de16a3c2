"""The checkpoint's files: complete, of gpt-oss's form, as published, and without values that cannot be."""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from chorale.harmony.vocab import load_vocabulary
from chorale.measure.selfcheck.check import Failed, Found, Skipped
from chorale.measure.selfcheck.device.machine import Machine
from chorale.model.config import RopeConfig
from chorale.model.demo import ARCHIVE, SHA256
from chorale.model.demo.archive import check_hash
from chorale.model.demo.shape import demo_config

_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")  # sha256 of large files, git's sha1 of small ones
_SMALL = ("config.json", "generation_config.json", "model.safetensors.index.json")
_MOST_THREADS = 8
_CONSTANTS = {"sliding_window": 128, "head_dim": 64, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
              "swiglu_alpha": 1.702, "rms_norm_eps": 1e-5}  # fmt: skip
# Beyond these a parameter is broken.
_LARGEST = 1e6
_LARGEST_SCALE = 127 + 32


def check_shapes(machine: Machine) -> Found:
    """Opening the checkpoint has compared index, headers, names, types and shapes with config.json. This
    compares config.json with what all gpt-oss models have in common."""
    model = machine.model
    wanted = {
        **_CONSTANTS,
        "rope": replace(RopeConfig(), attention_factor=model.rope.attention_factor),
        "layer_types": ("sliding_attention", "full_attention") * (model.num_hidden_layers // 2),
    }
    wrong = [f"{name} is {getattr(model, name)}, not {value}" for name, value in wanted.items()
             if getattr(model, name) != value]  # fmt: skip
    if abs(model.rope.concentration - RopeConfig().concentration) > 1e-4:
        wrong.append(f"the rotary concentration is {model.rope.concentration:.4f}")
    if wrong:
        raise Failed(f"config.json differs from gpt-oss: {'; '.join(wrong)}")
    files = machine.checkpoint.files
    tensors, octets = sum(len(file.entries) for file in files), machine.checkpoint.num_bytes
    detail = (
        f"{tensors} tensors in {len(files)} files, {octets / 1e9:.2f} GB, layout {machine.checkpoint.layout}"
    )
    return Found(detail, {"tensors": tensors, "files": len(files), "bytes": octets})


def check_checksums(machine: Machine) -> Found:
    """Compares the files with the hashes that the hub has published, or the demo with its archive."""
    load_vocabulary()  # checks its own hash
    paths = [file.path for file in machine.checkpoint.files]
    paths += [path for name in _SMALL if (path := machine.folder / name).is_file()]
    published = {path: digest for path in paths if (digest := published_hash(path)) is not None}
    if not published and is_demo(machine):
        return _check_demo(machine)
    if not published:
        raise Skipped(
            "these files have no published hashes here: they are not in the hub's cache, and no "
            ".cache/huggingface beside them names any"
        )
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        found = zip(published, pool.map(_has_hash, published, published.values()), strict=True)
        wrong = [path.name for path, is_same in found if not is_same]
    if wrong:
        raise Failed(f"the content of {', '.join(wrong)} is not what the hub has published")
    more = f"; {len(paths) - len(published)} others have none" if len(published) < len(paths) else ""
    return Found(f"hashes of {len(published)} files are the published ones{more}", {"files": len(published)})


def published_hash(path: Path) -> str | None:
    """Returns the hash that the hub named when the file was downloaded, or None if nothing here says it."""
    target = path.resolve()
    if target.parent.name == "blobs" and _HASH.fullmatch(target.name):
        return target.name  # the cache names files by it
    for folder in (path.parent, path.parent.parent):
        place = folder / ".cache" / "huggingface" / "download" / path.relative_to(folder)
        try:
            lines = place.with_name(place.name + ".metadata").read_text("ascii").split()
        except (OSError, ValueError):
            continue
        if len(lines) >= 2 and _HASH.fullmatch(lines[1]):
            return lines[1]
    return None


def _has_hash(path: Path, digest: str) -> bool:
    if len(digest) == 40:  # of a small file
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == digest
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest


def is_demo(machine: Machine) -> bool:
    """Returns whether it is the demo, though tensors of it may have changed."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_local_experts", "vocab_size")
    if any(getattr(machine.model, name) != getattr(demo_config(), name) for name in names):
        return False
    norm = load_file(ARCHIVE)["model.norm.weight"]
    return torch.equal(machine.checkpoint.read(None, "final_norm"), norm)


def _check_demo(machine: Machine) -> Found:
    """Its tables are computed when it is expanded. Raises ``CheckpointError`` for another archive."""
    check_hash(ARCHIVE, SHA256)
    here = {name: file for file in machine.checkpoint.files for name in file.entries}
    changed = [
        name
        for name, tensor in load_file(ARCHIVE).items()
        if not name.startswith("demo.") and not (name in here and _is_same(here[name].tensor(name), tensor))
    ]
    if changed:
        raise Failed(f"{len(changed)} tensors differ from the archive's: {', '.join(changed[:3])}")
    return Found("the demo's archive has its sha256, and the tensors of the layers are the archive's")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_alike = one.shape == other.shape and one.dtype == other.dtype
    return is_alike and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check_values(machine: Machine) -> Found:
    """Looks at every parameter: not finite, absurdly large, constant, NaN scales, and holes of zeros."""
    wrong: list[str] = []
    elements = 0
    for file in machine.checkpoint.files:
        for name in file.entries:
            tensor = file.tensor(name)
            elements += tensor.numel()
            fault = _fault_of(name, tensor)
            if fault is not None:
                wrong.append(f"{name}: {fault}")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise Failed("; ".join(wrong[:3]) + more, {"wrong": wrong})
    return Found(f"{elements / 1e9:.2f} billion stored values, all plausible", {"values": elements})


def _fault_of(name: str, tensor: torch.Tensor) -> str | None:
    if tensor.dtype != torch.uint8:
        return _fault_of_floats(tensor)
    if "scale" in name.rsplit(".", 1)[-1]:
        return _fault_of_scales(tensor)
    parts = tensor.flatten(1) if tensor.dim() > 2 else tensor.view(1, -1)  # experts, where all are in one
    for number, part in enumerate(parts):
        if not bool(part[: 2**16].any()) or not bool(part[-(2**16) :].any()) or not bool(part.any()):
            return f"expert {number} begins with zeros, ends with them or is zero: a hole in the file?"
    return None


def _fault_of_floats(tensor: torch.Tensor) -> str | None:
    low, high = tensor.aminmax() if tensor.numel() else (torch.zeros(()), torch.zeros(()))
    smallest, largest = float(low), float(high)
    if not (abs(smallest) < float("inf") and abs(largest) < float("inf")):  # False for NaN, too
        return "not finite (NaN or infinity)"
    if max(-smallest, largest) > _LARGEST:
        return f"values from {smallest:.3g} to {largest:.3g}"
    if tensor.numel() > 1 and smallest == largest:
        return f"all values are {smallest:g}"
    return None


def _fault_of_scales(tensor: torch.Tensor) -> str | None:
    counts = torch.bincount(tensor.reshape(-1).int(), minlength=256)
    present = counts.nonzero().squeeze(1).tolist()
    if present and present[-1] == 255:
        return f"{int(counts[255])} scales are 255 (NaN)"
    if len(present) == 1 and present[0] == 0:
        return "all scales are 0: a hole in the file?"
    if present and present[-1] > _LARGEST_SCALE:
        return f"a scale of 2^{present[-1] - 127}"
    return None
