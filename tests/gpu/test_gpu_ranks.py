"""Several ranks on GPUs; docs/explanation/parallel.md says what has passed.

``pytest -m gpu tests/gpu/test_gpu_ranks.py``, with 2 or 4 GPUs visible.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from chorale.config.weight_transfer import WeightTransferConfig
from chorale.engine.types import BASE, AdapterRef, GenerateRequest
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from chorale.model.safetensors_file import SafetensorsFile
from chorale.parallel import distributed
from chorale.runtime.transfer.nccl import _ID_KEY, NcclGroup, chunks
from tests.gpu.scores import FLOAT32_BOUND, check_rounding, differences, scores
from tests.parallel.test_ranks import WIDE, common
from tests.serve.engine.test_ranks import NOTICED, RESTARTED, failure_of, rank_of
from tests.serve.engine.test_weight_update import announced, begin, finish, octets, pickled_id, tell
from tests.support.device.lora import write_adapter
from tests.support.ports import free_port
from tests.support.runtime import make_engine, random_prompt, request, run, tokens_of
from tests.support.served import serving

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs 2 NVIDIA GPUs")]
RANKS = [size for size in (2, 4, 8) if size <= max(GPUS, 2)]
# Chunks and experts that do not divide, heads as wide as gpt-oss's.
SIZES: dict[str, Any] = {
    "layers": 4,
    "experts": 9,
    "hidden": 256,
    "inter": 9 * 64,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 64,
    "vocab": 1013,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("ranks"), make_config(**SIZES), seed=3)


@pytest.fixture(scope="module")
def cpu(checkpoint: Path) -> dict[str, list[float]]:
    return scores(checkpoint, device="cpu")


WHOLE = {"enable_expert_parallel": True}
NCCL = {"disable_custom_all_reduce": True}


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize(
    ("ops", "cut"),
    [("reference", {}), ("triton", {}), ("triton", WHOLE), ("triton", WHOLE | NCCL)],
    ids=["reference", "columns", "whole experts", "whole experts, nccl"],
)
@pytest.mark.parametrize("chunk", [7, 2048])
def test_float32_equals_the_cpu(
    checkpoint: Path, cpu: dict[str, list[float]], size: int, ops: str, cut: dict[str, bool], chunk: int
) -> None:
    options = cut | {"device": "cuda", "dtype": "float32", "max_num_batched_tokens": chunk}
    found = scores(checkpoint, ops=ops, tensor_parallel_size=size, **options)
    assert max(differences(cpu, found)) < FLOAT32_BOUND


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("chunk", [7, 20, 2048])
@pytest.mark.parametrize("cut", [{}, WHOLE], ids=["columns", "whole experts"])
def test_bfloat16_stays_within_its_bound(
    checkpoint: Path, cpu: dict[str, list[float]], size: int, cut: dict[str, bool], chunk: int
) -> None:
    """Of whole experts: the streaming products, of tokens as they come and of sorted pairs, and the grouped
    ones."""
    options = cut | {"device": "cuda", "dtype": "bfloat16", "max_num_batched_tokens": chunk}
    check_rounding(differences(cpu, scores(checkpoint, ops="triton", tensor_parallel_size=size, **options)))


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("cut", [{}, WHOLE], ids=["columns", "whole experts"])
def test_captured_steps_equal_launched_ones(checkpoint: Path, size: int, cut: dict[str, bool]) -> None:
    """Every kind of request, with graphs and without: the tokens of one rank, launched."""
    options: dict[str, Any] = {"device": "cuda", "ops": "triton", "dtype": "float32"}
    asked = common(random_prompt(50, 1))
    expected = tokens_by(checkpoint, asked, enforce_eager=True, **options)
    for eager in (True, False):
        found = tokens_by(checkpoint, asked, enforce_eager=eager, tensor_parallel_size=size, **options, **cut)
        assert found == expected


@pytest.mark.parametrize("size", RANKS)
def test_shutdown_closes_nccl(checkpoint: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    """A group that stays open would hold up the end of the process, here of captured graphs."""
    options: dict[str, Any] = {"device": "cuda", "ops": "reference", "enforce_eager": False}
    core = make_engine(checkpoint, tensor_parallel_size=size, **options)
    run(core, common(random_prompt(50, 1)))
    core.shutdown()
    assert not [each for each in caplog.records if each.name == distributed.__name__]


@pytest.mark.parametrize("size", RANKS)
def test_adapters_give_the_tokens_of_one_rank(checkpoint: Path, size: int, tmp_path: Path) -> None:
    """Of attention, router, head and experts, and of the base, in one batch; with graphs and without."""
    forms = ("attention", "bias", "router", "parameters", "head")
    for seed, form in enumerate(forms):
        write_adapter(tmp_path / form, make_config(**SIZES), form, seed)
    refs = [BASE, *(AdapterRef(n, form, str(tmp_path / form)) for n, form in enumerate(forms, 1))]
    asked = [
        msgspec.structs.replace(request(f"r{n}", random_prompt(40, n), max_tokens=8), adapter=adapter)
        for n, adapter in enumerate(refs)
    ]
    options: dict[str, Any] = {"device": "cuda", "ops": "triton", "dtype": "float32", "enable_lora": True}
    options["max_loras"] = len(forms)
    alone = tokens_by(checkpoint, asked, enforce_eager=True, **options)
    for eager in (True, False):
        found = tokens_by(checkpoint, asked, enforce_eager=eager, tensor_parallel_size=size, **options)
        assert found == alone


@pytest.mark.parametrize("limit", [0, 20_000], ids=["each", "packed"])
def test_weights_arrive_over_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """With weights from the other GPU, the engine answers like one that was started with them."""
    for name, seed in (("old", 3), ("new", 4)):
        write_random_checkpoint(tmp_path / name, make_config(**SIZES), seed=seed)
    options: dict[str, Any] = {"device": "cuda", "ops": "triton", "dtype": "float32"}
    asked = common(random_prompt(50, 1))
    wanted = tokens_by(tmp_path / "new", asked, **options)
    files = [SafetensorsFile(path) for path in (tmp_path / "new").glob("*.safetensors")]
    tensors = {name: file.tensor(name) for file in files for name in file.entries}
    specs = [(name, each.dtype, list(each.shape)) for name, each in tensors.items()]
    parts = [octets([tensors[name] for name, *_ in some]) for some in chunks(specs, limit)]
    own, port = (ctypes.c_byte * 128)(), free_port()
    ctypes.CDLL("libnccl.so.2").ncclGetUniqueId(ctypes.byref(own))
    stored = pickled_id(bytes(own), monkeypatch)

    def send() -> NcclGroup:
        torch.cuda.set_device(1)
        patience = timedelta(seconds=60)
        store: Any = dist.TCPStore("127.0.0.1", port, 2, True, patience, use_libuv=False)  # type: ignore[attr-defined]
        store.set(_ID_KEY, stored)
        group = NcclGroup(bytes(own), 0, 2, torch.device("cuda:1"))
        for part in parts:
            group.broadcast(part.to("cuda:1"))
        return group

    options |= {"weight_transfer_config": WeightTransferConfig(backend="nccl"), "prompt_delay": 0.0}
    core = make_engine(tmp_path / "old", **options)
    try:
        with ThreadPoolExecutor(1) as pool:
            sender = pool.submit(send)
            meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            begin(core, **meeting, packed=bool(limit), packed_buffer_size_bytes=limit or 1)
            tell(core, "update_weights", info=announced(tensors))
            finish(core)
            sender.result().close()
        found = tokens_of(run(core, asked))
    finally:
        core.shutdown()
    assert found == wanted


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("rows", [6, 16, 64])
def test_captured_steps_of_whole_experts_in_bfloat16(checkpoint: Path, size: int, rows: int) -> None:
    """Those of launched steps, mostly: bfloat16 rounds differently by batch, and graphs have more rows."""
    asked = [
        request(f"r{i}", random_prompt(5 + i % 40, seed=i), seed=i, max_tokens=5 + i % 16)
        for i in range(rows)
    ]  # the last steps have one row
    options: dict[str, Any] = WHOLE | {"tensor_parallel_size": size, "max_num_seqs": 64}
    options |= {"device": "cuda", "ops": "triton", "dtype": "bfloat16"}
    graph, plain = (tokens_by(checkpoint, asked, **options, enforce_eager=eager) for eager in (False, True))
    assert sum(graph[name] == plain[name] for name in graph) >= 0.7 * rows


def tokens_by(checkpoint: Path, asked: list[GenerateRequest], **options: Any) -> dict[str, list[list[int]]]:
    core = make_engine(checkpoint, **options)
    answers = run(core, asked)
    core.shutdown()
    return tokens_of(answers)


KILLS = int(os.environ.get("CHORALE_TEST_KILLS", "1"))
# Different prompts, because equal ones would be computed once.
PREFILLS = [f"{n}: " + "a long prompt " * 4000 for n in range(60)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_killed_rank_and_the_memory_it_leaves(tmp_path: Path, kind: str) -> None:
    folder = write_random_checkpoint(tmp_path / "model", make_config(**WIDE), seed=3)
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]
    options = ("--tensor-parallel-size", "2", "--served-model-name", "m", "--device", "cuda")
    with serving(folder, tmp_path, *options, "--max-model-len", "16384") as served:
        for _ in range(KILLS):
            rank = rank_of(served)
            prompt, max_tokens = (PREFILLS, 1) if kind == "prefill" else ("a decode", 8000)
            error, seconds = failure_of(served, prompt, max_tokens)
            assert "the engine failed" in error
            assert seconds < NOTICED
            assert f"rank 1 (process {rank}) was killed by SIGKILL" in served.log.read_text()
            served.wait_until("the restart", lambda: served.health() == 200, RESTARTED)

    def is_free() -> bool:
        after = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]
        return all(now >= before - 2**28 for now, before in zip(after, free, strict=True))

    served.wait_until("free memory", is_free)  # the driver takes a moment after the processes' end
