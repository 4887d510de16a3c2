"""Writes gpt-oss checkpoints of any shape with random weights, in any of the four layouts.

For tests, the demo and benchmarks. Each thread creates one tensor at a time and streams it to disk, so a
checkpoint of any size needs the memory of its largest tensor (times the number of threads). The
same seed gives the same weights in every layout (the dense layout holds the decoded MXFP4 values), so layouts
can be compared with each other; on another kind of device it gives other weights. Scales are chosen
so that activations stay of order one at any width and the router is about balanced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from chorale.kernels import mxfp4
from chorale.model.checkpoint import INDEX_NAME
from chorale.model.config import ModelConfig
from chorale.model.config_writer import GENERATION_CONFIG, config_json
from chorale.model.layouts import Layout, TensorSpec, kv_scale_specs, tensor_specs
from chorale.model.safetensors_file import DTYPES
from chorale.model.weights import Source

_DRAWN_AT_ONCE = 2**22  # float32 normals: 16 MB
_RMS_OF_FP4 = 2.92  # root mean square of the 16 values, all equally likely


def write_random_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    *,
    layout: Layout = "published",
    seed: int = 0,
    device: str = "cpu",
    threads: int = 1,
) -> Path:
    """Write config.json, generation_config.json and the weights; returns ``folder``.

    ``device`` generates the numbers, ``threads`` write files (gpt-oss-20b, an H200, 8 threads: seconds).

    The published and dense layouts have a file for each layer and one for the rest, with an index; the
    reference layout is one file (put it under ``original/`` to mimic the hub).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    source = RandomTensors(config, seed, device)
    specs = [*tensor_specs(config, layout), *kv_scale_specs(config)]
    if layout == "reference":
        write_safetensors(folder / "model.safetensors", specs, source)
    else:
        write_shards(folder, specs, source, config.num_hidden_layers + 1, threads)
        (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=1))
    (folder / "config.json").write_text(json.dumps(config_json(config, layout), indent=1))
    return folder


class Tensors(Protocol):
    """Makes the tensors of a checkpoint: bfloat16, uint8, or a float32 number."""

    def tensor(self, layer: int | None, role: str) -> torch.Tensor: ...


def write_shards(
    folder: Path, specs: list[TensorSpec], source: Tensors, num_files: int, threads: int = 1
) -> None:
    """Write a file for each layer and one for the rest, with an index."""
    shards = {
        f"model-{number:05d}-of-{num_files:05d}.safetensors": [spec for spec in specs if spec.layer == layer]
        for number, layer in enumerate([*range(num_files - 1), None], 1)
    }

    def write(name: str) -> int:
        return write_safetensors(folder / name, shards[name], source)

    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(write, reversed(shards)))  # the largest first
    weight_map = {spec.name: name for name, shard in shards.items() for spec in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index))


def write_safetensors(path: Path, specs: Iterable[TensorSpec], source: Tensors) -> int:
    """Writes one safetensors file, tensor by tensor. Returns the bytes of its tensors."""
    specs = list(specs)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        dtype = "U8" if spec.dtypes == {"U8"} else "F32" if spec.shape == () else "BF16"
        end = position + math.prod(spec.shape) * DTYPES[dtype].itemsize
        header[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned in the mapping
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            tensor = source.tensor(spec.layer, spec.role).contiguous().cpu()
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
    return position


class RandomTensors:
    """Random parameters by layer and role; each has its own seed, so order does not matter."""

    def __init__(self, config: ModelConfig, seed: int, device: str = "cpu") -> None:
        self.config = config
        self.seed = seed
        self.device = torch.device(device)
        self.shapes = {
            (spec.layer, spec.role): spec.shape
            for layout in ("reference", "dense")
            for spec in tensor_specs(config, layout)
        }

    def tensor(self, layer: int | None, role: str) -> torch.Tensor:
        """Returns bfloat16, uint8 for MXFP4 blocks and scales, or a float32 number."""
        role, _, expert = role.partition("/")
        name, _, part = role.partition(".")
        if name in ("k_scale", "v_scale"):
            return torch.tensor(0.3 if name == "k_scale" else 1.5)
        if part == "input_scale":
            return torch.tensor((1.0 + int(expert) / 8) / (32 if name == "gate_up" else 16))
        if expert:  # quark layout; all experts are created for each one, so only for small models
            whole = self.tensor(layer, role)[int(expert)]
            return whole.flatten(1) if part == "blocks" else whole
        if name in ("q", "k", "v"):
            return self._split_qkv(layer, name, part)
        shape = self.shapes[layer, role]
        if part == "dense":
            blocks, scales = self.tensor(layer, f"{name}.blocks"), self.tensor(layer, f"{name}.scales")
            return mxfp4.dequantize(blocks, scales, torch.bfloat16).transpose(1, 2)
        generator = torch.Generator(self.device).manual_seed(self._seed_of(layer, role))
        if part == "blocks":
            return _random_bytes(shape, generator)
        if part == "scales":
            # Four neighbouring exponents; the weights' root mean square is about 1 / sqrt(fan-in).
            lowest = 125 + round(math.log2(1 / (_RMS_OF_FP4 * math.sqrt(32 * shape[-1]))))
            return (_random_bytes(shape, generator) & 3) + lowest
        out = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        rows = max(1, _DRAWN_AT_ONCE * shape[0] // math.prod(shape))
        for chunk in out.split(rows):
            drawn = torch.randn(chunk.shape, generator=generator, device=self.device)
            chunk.copy_(_scaled(drawn, name, part))
        return out

    def _split_qkv(self, layer: int | None, name: str, part: str) -> torch.Tensor:
        query = self.config.num_attention_heads * self.config.head_dim
        rest = self.config.num_key_value_heads * self.config.head_dim
        begin, length = {"q": (0, query), "k": (query, rest), "v": (query + rest, rest)}[name]
        return self.tensor(layer, f"qkv.{part}").narrow(0, begin, length)

    def _seed_of(self, layer: int | None, role: str) -> int:
        roles = sorted({known for _, known in self.shapes})
        number = (0 if layer is None else layer + 1) * len(roles) + roles.index(role)
        return self.seed * 1_000_003 + number


class RandomSource(Source):
    """The published layout of ``RandomTensors``, to be packed without a file."""

    def __init__(self, config: ModelConfig, device: str, seed: int = 0) -> None:
        self._tensors = RandomTensors(config, seed, device)
        self._known = {(spec.layer, spec.role) for spec in tensor_specs(config, "published")}

    def has(self, layer: int | None, role: str) -> bool:
        return (layer, role) in self._known

    def read(self, layer: int | None, role: str) -> torch.Tensor:
        return self._tensors.tensor(layer, role)


def _scaled(normal: torch.Tensor, name: str, part: str) -> torch.Tensor:
    if name.endswith("norm"):
        return 1.0 + 0.1 * normal
    if name in ("embedding", "sinks"):
        return normal
    return normal * (0.1 if part == "bias" else normal.shape[-1] ** -0.5)


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Returns uniform bytes, eight per draw."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].view(shape)
