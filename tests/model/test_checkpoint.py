"""Checkpoints: what is wrong with one is said with file and tensor, and nothing wrong loads."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorale.errors import CheckpointError
from chorale.kernels import select_ops
from chorale.measure.bench.checkpoint_writer import RandomTensors, write_random_checkpoint
from chorale.model.checkpoint import INDEX_NAME, Checkpoint, digest_weights
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.model.layouts import Layout, tensor_specs
from chorale.model.safetensors_file import SafetensorsFile
from chorale.model.weights import Target, load_weights
from tests.support.device.model import SMALL, load_model

CONFIG = make_config(**{**SMALL, "layers": 2, "hidden": 32, "inter": 32, "vocab": 64})
LAYER = "model.layers.1."
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("pristine") / "model", CONFIG)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], index: bool = True) -> None:
    """Rewrite one shard with other tensors, and the index to match."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SHARD).items()}
    before = set(tensors)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SHARD)
    raw = json.loads((folder / INDEX_NAME).read_text())
    for name in before - set(tensors):
        del raw["weight_map"][name]
    raw["weight_map"].update(dict.fromkeys(tensors, SHARD))
    if index:
        (folder / INDEX_NAME).write_text(json.dumps(raw))


def complaint(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_weights(folder, Target(CONFIG, select_ops("reference", "cpu"), torch.float32))
    assert str(folder) in error.value.message
    return error.value.message


NORM = LAYER + "input_layernorm.weight"
BLOCKS = LAYER + "mlp.experts.gate_up_proj_blocks"


def test_norms_in_half_precision_are_read(folder: Path) -> None:
    """Converters write what has no quantized form in any of the three float types."""
    values: dict[str, torch.Tensor] = {}

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        values[NORM] = tensors[NORM] = tensors[NORM].half()

    edit(folder, halve)
    loaded = load_weights(folder, Target(CONFIG, select_ops("reference", "cpu"), torch.float32))
    assert torch.equal(loaded.layers[1].qkv.norm, values[NORM].float())


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], object]:
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: tensor}))


def as_type(name: str, dtype: torch.dtype) -> Callable[[Path], object]:
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Makes something else of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def one_more_file(folder: Path) -> None:
    shutil.copy(folder / SHARD, folder / "model-extra.safetensors")
    (folder / INDEX_NAME).unlink()


def without_index(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    (folder / SHARD).unlink()


def broken_link(folder: Path) -> None:
    """As the hub's cache has them where a blob was removed."""
    without_index(folder)
    (folder / SHARD).symlink_to("../../blobs/removed")


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4792272488\n"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing tensor": (lambda folder: edit(folder, lambda tensors: tensors.pop(NORM)), f"{NORM}: missing"),
    "extra tensor": (
        with_tensor("model.layers.9.surprise", torch.zeros(3)),
        f"{SHARD}: model.layers.9.surprise: not a tensor of this model",
    ),
    **{
        f"shape {list(shape)}": (
            with_tensor(NORM, torch.zeros(shape, dtype=torch.bfloat16)),
            f"{SHARD}: {NORM}: shape {list(shape)}, config.json says [32]",
        )
        for shape in ((31,), (1, 32), (64,))
    },
    "type of a norm": (as_type(NORM, torch.uint8), f"{SHARD}: {NORM}: dtype"),
    "type of blocks": (as_type(BLOCKS, torch.float32), f"{SHARD}: {BLOCKS}: dtype"),
    "unknown type": (as_type(NORM, torch.int64), f"{SHARD}: {NORM}: dtype 'I64' is not one of"),
    "last byte": (
        lambda folder: os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 1),
        f"{SHARD}: not a whole safetensors file",
    ),
    "more bytes": (
        lambda folder: (folder / SHARD).write_bytes((folder / SHARD).read_bytes() + b"more"),
        f"{SHARD}: not a whole safetensors file",
    ),
    "missing file": (lambda folder: (folder / SHARD).unlink(), f"{SHARD}: named by {INDEX_NAME} but missing"),
    "missing file without an index": (without_index, "model.layers.1.input_layernorm.weight: missing"),
    "a tensor in two files": (one_more_file, "also in"),
    "a pipe as index": (in_place_of(INDEX_NAME, os.mkfifo), f"{INDEX_NAME}: not a file"),
    "a link to nothing": (broken_link, f"{SHARD}: not a file, or a broken link"),
    "a clone without lfs": (
        in_place_of(SHARD, lambda path: path.write_text(LFS)),
        f"{SHARD}: a Git LFS pointer",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_file_and_tensor(folder: Path, fault: str) -> None:
    change, expected = FAULTS[fault]
    change(folder)
    assert expected in complaint(folder)


def test_no_weights(tmp_path: Path) -> None:
    """A pickle is none."""
    assert "no such folder" in complaint(tmp_path / "absent")
    assert "holds no safetensors file" in complaint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "holds no safetensors file" in complaint(tmp_path)
    save_file({"model.layers.0.mlp.gate_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert "no gpt-oss expert tensors" in complaint(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "cannot be read"),
        ("[]", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd.safetensors"}}', "a: '../../etc/passwd.safetensors' is not"),
        ('{"weight_map": {"a": 3}}', "a: '3' is not"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "absent.safetensors: named by"),
        (f'{{"weight_map": {{"a": "{SHARD}"}}}}', "a: listed in"),
        (json.dumps({"weight_map": {"a": "x" * 300 + ".safetensors"}}), "is not a safetensors file name"),
        ('{"weight_map": {"a": "b\\n.safetensors"}}', r"a: 'b\n.safetensors' is not"),
        (f'{{"weight_map": {{"a\\u001b[2J": "{SHARD}"}}}}', r"'a\x1b[2J' is not the name"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_bad_index(folder: Path, content: str, expected: str) -> None:
    (folder / INDEX_NAME).write_text(content)
    message = complaint(folder)
    assert INDEX_NAME in message
    assert expected in message


@pytest.mark.parametrize("name", ["red\n\x1b[31m", "a" * 100_000])
def test_unprintable_names_give_printable_messages(folder: Path, name: str) -> None:
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(3)}), index=False)
    message = complaint(folder)
    assert message.isprintable()
    assert len(message) < 1000


# ------------------------------------------------------------------ headers


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def file_of(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


WHOLE = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": WHOLE | {"dtype": "F32"}},
        {"a": WHOLE | {"shape": [-8]}},
        {"a": WHOLE | {"shape": [2**62, 2**62]}},
        {"a": WHOLE | {"shape": [16], "data_offsets": [0, 16]}},
        {"a": WHOLE | {"shape": [4], "data_offsets": [4, 8]}},
        {"a": WHOLE, "b": WHOLE},
        {"a": []},
        {"red\n": WHOLE | {"data_offsets": [8, 0]}},
        {"__metadata__": "pt"},
        {},
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' * 50_000,
    ],
    ids=range(13),
)
def test_false_headers_are_refused(tmp_path: Path, header: object) -> None:
    path = tmp_path / "lie.safetensors"
    path.write_bytes(file_of(header, bytes(8)))
    with pytest.raises(CheckpointError, match=r"lie\.safetensors: ") as error:
        SafetensorsFile(path)
    assert error.value.message.isprintable()
    assert len(error.value.message) < 1000


BIG = [2**31, 2**32 - 1, 2**40, 2**47, 2**53, 2**63, 2**64, 10**30]
JUNK = [0, -1, 1.5, None, "3", [1], [], {}, {"dtype": "U8"}, "F64", "bf16", *BIG]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """One random fault in the header or the framing of a file that was good."""
    header, body = header_of(data)
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    field = rng.choice(sorted(entry))
    kind = rng.randrange(8)
    if kind == 0:
        entry[field] = rng.choice([each for each in JUNK if each != entry[field]])
    elif kind == 1:
        numbers = entry[rng.choice(["shape", "data_offsets"])]
        numbers[rng.randrange(len(numbers))] = rng.choice([each for each in JUNK if each not in numbers])
    elif kind == 2:
        entry["data_offsets"][rng.randrange(2)] += rng.choice([-1, 1, -8, 8, *BIG])
    elif kind == 3:
        del entry[field]
    elif kind == 4:
        header[name + rng.choice(["x", ".weight", "/../..", "\u0000"])] = header.pop(name)
    elif kind == 5:
        return rng.choice([0, 1, len(data), 2**40, 2**64 - 1]).to_bytes(8, "little") + data[8:]
    elif kind == 6:
        return data[: rng.randrange(len(data))]
    else:
        text = bytearray(json.dumps(header).encode())
        text[rng.randrange(len(text))] = rng.choice([0, 10, 34, 91, 125, 255])
        return file_of(bytes(text), body)
    return file_of(header, body)


def new_peak_memory() -> int:
    """Forget the process's peak: an earlier test's must not hide this one's. Returns bytes in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """The most bytes of memory in use since the peak was forgotten."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_mutated_headers(tmp_path: Path) -> None:
    """None loads, each is a CheckpointError with the file's name, and none costs memory.

    Mutating one byte of JSON text can leave the header as it was (whitespace) or change only metadata: those
    are recognised by parsing, and must still describe the same tensors.
    """
    config = make_config(**{**SMALL, "layers": 1, "hidden": 32, "inter": 32, "vocab": 64})
    good = write_random_checkpoint(tmp_path / "good", config, layout="reference")
    data = (good / "model.safetensors").read_bytes()
    truth, _ = header_of(data)
    truth.pop("__metadata__")
    bad = tmp_path / "bad"
    bad.mkdir()
    path = bad / "model.safetensors"
    rng = random.Random(7)
    Checkpoint(good, config)
    before = new_peak_memory()
    refused = 0
    for _ in range(2000):
        path.write_bytes(mutate(rng, data))
        try:
            checkpoint = Checkpoint(bad, config)
        except CheckpointError as error:
            refused += str(bad) in error.message
        else:
            loaded = checkpoint.files[0].entries
            assert set(loaded) == set(truth)
            assert all(list(loaded[name].shape) == truth[name]["shape"] for name in truth)
            assert all([loaded[n].begin, loaded[n].end] == truth[n]["data_offsets"] for n in truth)
    assert refused > 1980
    grown = peak_memory() - before
    assert grown < 16 * 2**20, f"peak memory grew by {grown / 2**20:.0f} MB"


# ------------------------------------------------------------------ layouts


@pytest.mark.parametrize("layout", ["published", "dense", "reference"])
def test_every_layout_holds_the_same_model(tmp_path: Path, layout: Layout) -> None:
    folder = write_random_checkpoint(tmp_path / "model", CONFIG, layout=layout, seed=5)
    checkpoint = Checkpoint(folder, ModelConfig.load(folder))
    assert checkpoint.layout == layout
    source = RandomTensors(CONFIG, 5)
    for spec in tensor_specs(CONFIG, layout):
        assert torch.equal(checkpoint.read(spec.layer, spec.role), source.tensor(spec.layer, spec.role))
    for file in folder.glob("*.safetensors"):  # and the safetensors library agrees that the files are good
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, SafetensorsFile(file).tensor(name))


def test_original_folder_is_the_fallback(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "original", CONFIG, layout="reference")
    model = load_model(tmp_path)  # config.json, too, only under original/
    assert model.config.num_hidden_layers == 2
    write_random_checkpoint(tmp_path, CONFIG)
    assert Checkpoint(tmp_path, CONFIG).layout == "published"


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    path = tmp_path / "odd.safetensors"
    path.write_bytes(file_of(header, b"abc" + torch.tensor([1.5, -2.0]).numpy().tobytes()))
    assert SafetensorsFile(path).tensor("b").tolist() == [1.5, -2.0]


def test_large_experts_stay_views_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the budget nothing of the experts is copied: their storage is the mapping itself."""
    monkeypatch.setattr("chorale.kernels.reference.moe.DECODED_BUDGET", 0)
    weights = load_weights(folder, Target(CONFIG, select_ops("reference", "cpu"), torch.bfloat16))
    experts = weights.layers[0].experts
    assert experts.gate_up_blocks.dtype == torch.uint8
    nbytes = experts.gate_up_blocks.untyped_storage().nbytes()
    assert nbytes == experts.gate_up_blocks.numel()
    from_file = SafetensorsFile(folder / "model-00001-of-00003.safetensors")
    again = from_file.tensor("model.layers.0.mlp.experts.gate_up_proj_blocks")
    assert torch.equal(again, experts.gate_up_blocks)


def test_progress(folder: Path) -> None:
    seen: list[tuple[str, float, str]] = []
    target = Target(CONFIG, select_ops("auto", "cpu"), torch.float32)
    load_weights(folder, target, lambda *report: seen.append(report))
    fractions = [fraction for _, fraction, _ in seen]
    assert {phase for phase, _, _ in seen} == {"load"}
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError):
        SafetensorsFile(tmp_path / "model.safetensors")


def test_the_digest_of_the_weights_names_the_model_and_not_the_folder(pristine: Path, folder: Path) -> None:
    assert digest_weights(folder) == digest_weights(pristine)
    edit(folder, lambda tensors: tensors.update({name: value + 1 for name, value in [min(tensors.items())]}))
    tuned = digest_weights(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    assert len({digest_weights(pristine), tuned, digest_weights(folder)}) == 3
