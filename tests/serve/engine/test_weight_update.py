"""Engines that get new weights while they are paused, on a CPU: they answer as if started with them."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from chorale.config.read_objects import read_weight_transfer
from chorale.config.speculative import SpeculativeConfig
from chorale.config.weight_transfer import WeightTransferConfig
from chorale.engine.commands import Command, Outcome
from chorale.engine.core import EngineCore
from chorale.errors import ConfigError, ConflictError, RequestError
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import Weights
from chorale.model.layouts import Layout
from chorale.model.safetensors_file import SafetensorsFile
from chorale.model.update import WeightUpdate, tensor_pairs
from chorale.model.weights import Target, load_weights
from chorale.runtime.transfer.ipc import read_handles
from chorale.runtime.transfer.nccl import read_id
from tests.support.ports import free_port
from tests.support.runtime import Answer, example_answers, random_prompt, request, run, running, small_config

LAYOUTS: tuple[Layout, ...] = ("published", "dense", "reference")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "old", and "published", "dense" and "reference": new weights in different layouts."""
    root = tmp_path_factory.mktemp("checkpoints")
    write_random_checkpoint(root / "old", small_config(), seed=3)
    for layout in LAYOUTS:
        write_random_checkpoint(root / layout, small_config(), layout=layout, seed=4)
    return root


def engine(
    root: Path, model: str, backend: Any = "checkpoint", **options: Any
) -> AbstractContextManager[EngineCore]:
    config = WeightTransferConfig(backend=backend, allowed_folders=(str(root),))
    return running(root / model, weight_transfer_config=config, prompt_delay=0.0, **options)


def tell(core: EngineCore, action: Any, **fields: Any) -> Outcome:
    return core.control(Command(action=action, **fields)).result(0)


def fresh_answers(root: Path, **options: Any) -> dict[str, list[Answer]]:
    with engine(root, "published", **options) as core:
        return example_answers(core)


def begin(core: EngineCore, **info: Any) -> None:
    tell(core, "pause", mode="keep")
    tell(core, "init_weight_transfer_engine", info=info)
    tell(core, "start_weight_update")


def send(core: EngineCore, path: object, **more: Any) -> None:
    tell(core, "update_weights", info={"path": str(path), **more})


def finish(core: EngineCore, *paths: object) -> Outcome:
    for path in paths:
        send(core, path)
    tell(core, "prepare_weight_update")
    tell(core, "finish_weight_update")
    return tell(core, "resume")


def names_and_tensors(root: Path) -> dict[str, torch.Tensor]:
    """Returns all new tensors."""
    file = SafetensorsFile(next((root / "reference").glob("*.safetensors")))
    return {name: file.tensor(name).clone() for name in file.entries}


def test_updated_weights_give_the_bits_of_an_engine_started_with_them(root: Path) -> None:
    """In each layout: bfloat16 experts of the dense one become the MXFP4 from which they were decoded."""
    wanted = fresh_answers(root)
    with engine(root, "old") as core:
        before = example_answers(core)
        assert before != wanted
        for number, layout in enumerate(LAYOUTS):
            begin(core)
            assert finish(core, root / layout).weight_version == str(2 * number + 1)
            assert example_answers(core) == wanted
            begin(core)
            finish(core, root / "old")
            assert example_answers(core) == before


def test_a_part_of_the_tensors_leaves_the_others(root: Path) -> None:
    """A head that shares the embedding sees the new one."""
    method = SpeculativeConfig(method="synthetic", num_speculative_tokens=3)
    tensors, names = names_and_tensors(root), ["embedding.weight", "norm.scale"]
    save_file({name: tensors[name] for name in names}, root / "few.safetensors")
    with engine(root, "old", speculative_config=method) as core:
        begin(core)
        finish(core, root / "few.safetensors")
        loaded = core._executor._memory._loaded  # type: ignore[attr-defined]
        weights, new = loaded.model.weights, load(root / "published")
        assert torch.equal(weights.embedding, new.embedding)
        assert torch.equal(weights.final_norm, new.final_norm)
        assert torch.equal(weights.layers[0].sinks, load(root / "old").layers[0].sinks)
        assert loaded.drafts.head.weights.embedding is weights.embedding


def test_a_running_request_goes_on_with_the_new_weights(root: Path) -> None:
    """Its context is computed again, and the chunks tell which tokens came from which weights."""
    prompt = random_prompt(5, 40)
    with engine(root, "old", async_scheduling=True) as core:
        core.add_request(request("a", prompt, temperature=0, max_tokens=30))
        chunks = [chunk for _ in range(12) for chunk in core.step()]
        pause = core.control(Command(action="pause", mode="keep"))
        while not pause.done():
            chunks += core.step()
        begin(core)
        finish(core, root / "published")
        while core.has_work:
            chunks += core.step()
        firsts, tokens = {}, list[int]()
        for chunk in chunks:
            if chunk.weight_version:
                firsts[chunk.weight_version] = len(tokens)
            tokens += chunk.token_ids
        assert list(firsts) == ["default", "1"]
        changed_at = firsts["1"]
        assert (firsts["default"], len(tokens)) == (0, 30)
        assert 0 < changed_at < 30
        core.control(Command(action="update_weight_version", version="mine"))
        again = run(
            core, [request("b", [*prompt, *tokens[:changed_at]], temperature=0, max_tokens=30 - changed_at)]
        )
        assert again["b"][0].token_ids == tokens[changed_at:]
        assert tell(core, "state").weight_version == "mine"


# ------------------------------------------------------------------ values that are overwritten


def load(folder: Path) -> Weights:
    config, ops = ModelConfig.load(folder), REFERENCE_OPS
    found = load_weights(folder, Target(config, ops, torch.bfloat16))
    return replace(found, embedding=found.embedding.clone())


def differences(one: Weights, other: Weights) -> int:
    return sum(not torch.equal(*pair) for pair in tensor_pairs(one, other, "weights"))


def test_overwritten_values_are_saved_before(root: Path) -> None:
    """Captured graphs know addresses, so that values are written in place."""
    weights, new, old = load(root / "old"), load(root / "published"), load(root / "old")
    for tensor, _ in tensor_pairs(weights, new, ""):
        tensor.data = tensor.clone()  # not a view of the file
    addresses = [tensor.data_ptr() for tensor, _ in tensor_pairs(weights, new, "")]
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def save(tensors: Any) -> None:
        saved.extend((each, each.clone()) for each in tensors)

    target = Target(ModelConfig.load(root / "old"), REFERENCE_OPS, torch.bfloat16)
    update = WeightUpdate(target, weights, save)
    for name, tensor in names_and_tensors(root).items():
        update.add(name, tensor)
        update.keep()
        tensor.zero_()  # the sender's memory is used again
    assert update.finish() is weights
    assert differences(weights, new) == 0
    assert [tensor.data_ptr() for tensor, _ in tensor_pairs(weights, new, "")] == addresses
    for tensor, copy in saved:
        tensor.copy_(copy)
    assert differences(weights, old) == 0
    with pytest.raises(ConfigError):
        tensor_pairs(weights.final_norm, weights.final_norm.half(), "norm")


# ------------------------------------------------------------------ failures


Update = Callable[[EngineCore, Path], object]


def changed(root: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Writes all new tensors, changed, to a file."""
    tensors = names_and_tensors(root)
    change(tensors)
    path = root / f"{len(list(root.iterdir()))}.safetensors"
    save_file(tensors, path)
    return path


def send_changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Update:
    return lambda core, root: finish(core, changed(root, change))


def send_bytes(change: Callable[[bytes], bytes]) -> Update:
    def update(core: EngineCore, root: Path) -> None:
        path = changed(root, dict)
        path.write_bytes(change(path.read_bytes()))
        finish(core, path)

    return update


def half(root: Path) -> Path:
    return changed(root, lambda tensors: [tensors.pop(name) for name in list(tensors)[::2]])


def link(core: EngineCore, root: Path) -> None:
    outside = root.parent / "outside.safetensors"
    outside.write_bytes(changed(root, dict).read_bytes())
    (root / "link.safetensors").unlink(missing_ok=True)
    (root / "link.safetensors").symlink_to(outside)
    send(core, root / "link.safetensors")


def index_without_file(core: EngineCore, root: Path) -> None:
    folder = root / "indexed"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(changed(root, dict).read_bytes())
    listed = {"weight_map": {"norm.scale": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    send(core, folder)


def killed(core: EngineCore, root: Path) -> None:
    """The sender is killed after a part, and the operator resumes; the rest cannot follow."""
    send(core, half(root))
    tell(core, "resume")
    tell(core, "pause", mode="keep")
    finish(core)


NORM, SINKS = "norm.scale", "block.0.attn.sinks"
FAILURES: dict[str, Update] = {
    "a wrong shape": send_changed(lambda t: t.update({SINKS: t[SINKS][:-1].clone()})),
    "a wrong type": send_changed(lambda t: t.update({SINKS: t[SINKS].to(torch.uint8)})),
    "a missing tensor": send_changed(lambda t: t.pop("block.1.attn.qkv.bias")),
    "a missing expert bias": send_changed(lambda t: t.pop("block.3.mlp.mlp2_bias")),
    "an unknown name": send_changed(lambda t: t.update(x=t[NORM].clone())),
    "NaN": send_changed(lambda t: t[NORM].fill_(torch.nan)),
    "infinity in an expert": send_changed(lambda t: t["block.2.mlp.mlp1_bias"].fill_(torch.inf)),
    "a full disk": send_bytes(lambda data: data[: len(data) * 2 // 3]),
    "a full disk, within the header": send_bytes(lambda data: data[:100]),
    "an empty file": send_bytes(lambda data: b""),
    "bytes after the end": send_bytes(lambda data: data + b"x"),
    "no safetensors file": send_bytes(lambda data: b"\x80\x04" + data[2:]),
    "a tensor sent twice": lambda core, root: finish(core, root / "reference", root / "reference"),
    "no tensor": lambda core, root: finish(core),
    "a half": lambda core, root: finish(core, half(root)),
    "a killed sender": killed,
    "no such file": lambda core, root: send(core, root / "none.safetensors"),
    "an empty folder": lambda core, root: send(core, root / "empty"),
    "a missing file of an index": index_without_file,
    "a path outside": lambda core, root: send(core, root / ".." / "outside.safetensors"),
    "a link to the outside": link,
    "a relative path": lambda core, root: send(core, "published"),
    "an unknown key": lambda core, root: send(core, root / "published", trust=True),
    "a second start": lambda core, root: tell(core, "start_weight_update"),
    "a sleep": lambda core, root: tell(core, "sleep"),
}


def test_after_each_failure_the_old_weights_answer_with_the_same_bits(root: Path) -> None:
    (root / "empty").mkdir()
    with engine(root, "old") as core:
        wanted = example_answers(core)
        for name, fail in FAILURES.items():
            begin(core)
            with pytest.raises(ConflictError):
                fail(core, root)
            tell(core, "resume")
            assert example_answers(core) == wanted, name
            assert tell(core, "state").weight_version == "default"
        begin(core)
        assert finish(core, root / "published").weight_version == "1"
        assert example_answers(core) != wanted


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_pauses_a_running_engine_until_it_ends(root: Path, fails: bool) -> None:
    """TRL's client sends no pause."""
    prompt = random_prompt(5, 40)
    with engine(root, "old", async_scheduling=True) as core:
        tell(core, "init_weight_transfer_engine")
        with pytest.raises(ConflictError):
            tell(core, "update_weights")
        core.add_request(request("a", prompt, temperature=0, max_tokens=30))
        chunks = [chunk for _ in range(12) for chunk in core.step()]
        started = core.control(Command(action="start_weight_update"))
        core.add_request(request("b", prompt, temperature=0, max_tokens=9))
        while not started.done():
            chunks += core.step()
        assert started.result().is_paused
        if fails:
            with pytest.raises(ConflictError):
                send(core, root / "none")
        else:
            send(core, root / "published")
            tell(core, "pause", mode="wait")  # an operator's pause stays, and nothing runs before the end
            assert not core.has_work
            assert tell(core, "finish_weight_update").is_paused
            tell(core, "resume")
        assert not tell(core, "state").is_paused
        while core.has_work:
            chunks += core.step()
        assert sum(len(chunk.token_ids) for chunk in chunks) == 30 + 9
        versions = {chunk.weight_version for chunk in chunks if chunk.weight_version}
        assert versions == ({"default"} if fails else {"default", "1"})


@pytest.mark.parametrize(
    "given", [{"backend": "sparse_nccl"}, {"backend": "checkpoint"}, {"backend": "ipc", "trust": True}, []]
)
def test_a_wrong_configuration_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError):
        read_weight_transfer(given, "--weight-transfer-config")


# ------------------------------------------------------------------ nccl, over gloo


class Sender(threading.Thread):
    """Rank 0 of a group over gloo: vLLM's sender, with gloo instead of NCCL."""

    def __init__(self, port: int, size: int) -> None:
        super().__init__(daemon=True)
        self._port, self._size = port, size
        self.parts: list[torch.Tensor] = []
        self.connected = threading.Event()
        self._go = threading.Event()

    def run(self) -> None:
        patience = timedelta(seconds=120)
        store = dist.TCPStore("127.0.0.1", self._port, self._size, True, patience, use_libuv=False)  # type: ignore[attr-defined]
        group: Any = dist.ProcessGroupGloo(store, 0, self._size, patience)
        self.connected.set()
        self._go.wait()
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for part in self.parts:
            group.broadcast([part], options).wait()

    def send(self, parts: list[torch.Tensor]) -> None:
        """Broadcasts each part, then closes the connection."""
        self.parts = parts
        self._go.set()


def octets(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in tensors])


def announced(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns vLLM's ``update_info``."""
    return {
        "names": list(tensors),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
    }


@pytest.mark.parametrize(("size", "limit"), [(1, 0), (2, 20_000)], ids=["each", "packed, two processes"])
def test_tensors_arrive_by_broadcast(root: Path, size: int, limit: int) -> None:
    wanted = fresh_answers(root, tensor_parallel_size=size)
    port = free_port()
    tensors = names_and_tensors(root)
    parts: list[list[torch.Tensor]] = [[]]
    for each in tensors.values():
        parts[-1].append(each)
        if not limit or octets(parts[-1]).numel() > limit:
            parts.append([])
    sender = Sender(port, 1 + size)
    sender.start()
    meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 1 + size}
    with engine(root, "old", "nccl", tensor_parallel_size=size) as core:
        before = example_answers(core)
        begin(core, **meeting, packed=bool(limit), packed_buffer_size_bytes=limit or 1)
        sender.send([octets(each) for each in parts if each])
        tell(core, "update_weights", info=announced(tensors))
        sender.join()
        assert finish(core).weight_version == "1"
        assert example_answers(core) == wanted
        begin_again = Command(action="start_weight_update")
        tell(core, "pause", mode="keep")
        core.control(begin_again).result(0)
        with pytest.raises(ConflictError):  # the sender is gone
            tell(core, "update_weights")
        tell(core, "resume")
        assert example_answers(core) == wanted != before


# ------------------------------------------------------------------ pickles


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


SIZE = torch.Size([2, 3])
HANDLE: list[Any] = [
    torch.Tensor, SIZE, (3, 1), 0, torch.storage.UntypedStorage, torch.bfloat16, 0, b"h" * 66, 12, 512, False,
    b"/torch_12_345_0", 7, b"e" * 64, True,
]  # fmt: skip


def pickled(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def test_handles_are_read_as_plain_data() -> None:
    (found,) = read_handles(pickled([{"gpu": tuple(HANDLE), "other": None}]), "gpu")
    assert (found.size, found.stride, found.dtype, found.memory) == ((2, 3), (3, 1), "bfloat16", b"h" * 66)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, Evil()), (1, torch.Size([2, 4])), (1, torch.Size([2])), (2, (-3, 1)), (3, 1), (3, -1),
        (5, torch.float32), (5, torch.complex64), (7, b"h"), (8, 11), (9, -1), (11, b"/etc/passwd"),
        (12, 10_000), (13, b"e"), (14, None),
    ],
)  # fmt: skip
def test_other_handles_are_refused(
    place: int, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    handle = list(HANDLE)
    handle[place] = value
    with pytest.raises(RequestError):
        read_handles(pickled([{"gpu": tuple(handle)}]), "gpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "?", pickled([{}]), pickled(7), pickled({"other": tuple(HANDLE)})])
def test_a_text_without_a_handle_for_this_gpu_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        read_handles(text, "gpu")


def pickled_id(octets: bytes, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Returns the id as vLLM's sender stores it: a pickle of its ``ncclUniqueId``."""
    name = "vllm.distributed.device_communicators.pynccl_wrapper"
    fields = {"_fields_": [("internal", ctypes.c_byte * 128)], "__module__": name}
    module: Any = types.ModuleType(name)
    kind: Any = type("ncclUniqueId", (ctypes.Structure,), fields)
    module.ncclUniqueId = kind
    for end in (4, 3, 2, 1):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:end]), module)
    return pickle.dumps(kind.from_buffer_copy(octets))


def test_the_id_of_nccl_is_read_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = bytes(range(128))
    assert read_id(pickled_id(sent, monkeypatch)) == sent
    for other in (Evil(), b"1", sent.hex()):
        with pytest.raises(RequestError):
            read_id(pickle.dumps(other))
