"""Checks of the checkpoint's files: their structure, checksums and values."""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from chorale.harmony.vocab import load_vocabulary
from chorale.measure.selfcheck.check import Failed, Found, Skipped
from chorale.measure.selfcheck.device.machine import Machine
from chorale.model.config import RopeConfig
from chorale.model.demo.compare import changed_tensors, is_demo

_SMALL = ("config.json", "generation_config.json", "model.safetensors.index.json")
_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")  # sha256 of large files, git's sha1 of small ones
_MOST_THREADS = 8
_CONSTANTS = {"sliding_window": 128, "head_dim": 64, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
              "swiglu_alpha": 1.702, "rms_norm_eps": 1e-5}  # fmt: skip
# Larger values mean a broken parameter. Scales are exponents of two, plus 127.
_LARGEST = 1e6
_LARGEST_SCALE = 127 + 32


def check_shapes(machine: Machine) -> Found:
    """Compares config.json with the constants of all gpt-oss models. Opening the checkpoint has already
    compared the index, headers, names, types and shapes with config.json."""
    model = machine.model
    wanted: dict[str, object] = {
        **_CONSTANTS,
        "rope": replace(RopeConfig(), attention_factor=model.rope.attention_factor),
        "layer_types": ("sliding_attention", "full_attention") * (model.num_hidden_layers // 2),
    }
    is_puzzle = bool(model.layer_experts)  # another RoPE, and windows of its own
    if is_puzzle:
        del wanted["rope"], wanted["layer_types"]
    wrong = [f"{name} is {getattr(model, name)}, not {value}" for name, value in wanted.items()
             if getattr(model, name) != value]  # fmt: skip
    if not is_puzzle and abs(model.rope.concentration - RopeConfig().concentration) > 1e-4:
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
    load_vocabulary()  # verifies its own hash
    paths = [file.path for file in machine.checkpoint.files]
    paths += [path for name in _SMALL if (path := machine.folder / name).is_file()]
    published = {path: digest for path in paths if (digest := _published_hash(path)) is not None}
    if not published and is_demo(machine.checkpoint, machine.model):
        if changed := changed_tensors(machine.checkpoint):
            raise Failed(f"{len(changed)} tensors differ from the archive's: {', '.join(changed[:3])}")
        return Found(
            "the demo's archive has the expected sha256, and the layers' tensors equal the archive's"
        )
    if not published:
        raise Skipped(
            "no published hashes were found for these files: they are not in the hub's cache, and there is"
            " no .cache/huggingface with hashes next to them"
        )
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        found = zip(published, pool.map(_has_hash, published, published.values()), strict=True)
        wrong = [path.name for path, is_same in found if not is_same]
    if wrong:
        raise Failed(f"the content of {', '.join(wrong)} is not what the hub has published")
    more = f"; {len(paths) - len(published)} others have none" if len(published) < len(paths) else ""
    return Found(f"hashes of {len(published)} files are the published ones{more}", {"files": len(published)})


def _published_hash(path: Path) -> str | None:
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
    """Returns whether the file's content has the hash. Reads all of it."""
    if len(digest) == 40:  # of a small file
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == digest
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest


def check_values(machine: Machine) -> Found:
    """Searches all tensors for infinite, NaN, absurdly large or constant values, NaN scales and holes."""
    wrong: list[str] = []
    elements = 0
    for file in machine.checkpoint.files:
        for name in file.entries:
            tensor = file.tensor(name)
            elements += tensor.numel()
            if (fault := _fault_of(name, tensor)) is not None:
                wrong.append(f"{name}: {fault}")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise Failed("; ".join(wrong[:3]) + more, {"wrong": wrong})
    return Found(f"{elements / 1e9:.2f} billion stored values, all plausible", {"values": elements})


def _fault_of(name: str, tensor: torch.Tensor) -> str | None:
    if tensor.dtype == torch.uint8 and "scale" not in name.rsplit(".", 1)[-1]:
        experts = tensor.flatten(1) if tensor.dim() > 2 else tensor.view(1, -1)  # one tensor for all, or one
        for number, data in enumerate(experts):
            if not bool(data[: 2**16].any()) or not bool(data[-(2**16) :].any()) or not bool(data.any()):
                return f"expert {number} begins with zeros, ends with them or is zero: a hole in the file?"
        return None
    smallest, largest = map(float, tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
    if tensor.dtype == torch.uint8:
        if largest == 255:
            return f"{int((tensor == 255).sum())} scales are 255 (NaN)"
        if largest == 0:
            return "all scales are 0: a hole in the file?"
        return f"a scale of 2^{largest - 127:g}" if largest > _LARGEST_SCALE else None
    if not (abs(smallest) < float("inf") and abs(largest) < float("inf")):  # False for NaN, too
        return "not finite (NaN or infinity)"
    if max(-smallest, largest) > _LARGEST:
        return f"values from {smallest:.3g} to {largest:.3g}"
    return f"all values are {smallest:g}" if tensor.numel() > 1 and smallest == largest else None
