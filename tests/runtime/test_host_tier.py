"""KV pages in host memory on the real runtime: bytes and order of copies, tokens equal to those without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, HostLoad, IntArray, StepPlan, Transfers
from chorale.errors import ConfigError
from chorale.kernels.ops import PageCopies
from chorale.kernels.reference.pages import ReferencePageCopies
from chorale.model.config import ModelConfig
from chorale.runtime.device import Device
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.offload import HostPages, PageTransfers
from chorale.runtime.sizing.memory import KvGeometry
from chorale.runtime.sizing.offload import HostTierSizes, check_host_memory, host_tier_sizes
from chorale.runtime.steps.mixed_graphs import dummy_plan
from chorale.runtime.steps.results import empty_result
from tests.runtime.order import Order, OrderedDevice
from tests.support.device.head_worlds import drafting_of, head_engine
from tests.support.runtime import CPU, make_engine, random_prompt, request, run, tokens_of, write_checkpoint

NUM_BLOCKS, NUM_SLOTS = 40, 100


def ids(numbers: Any) -> IntArray:
    return np.array(list(numbers), np.int32)


class Traffic:
    """Random copies between a pool and host memory, next to a record of what each must hold. A byte of a
    page that is not where the record says is an error."""

    def __init__(self, device: Device, make_copies: Any, seed: int, *, staged: int = 12) -> None:
        self.rng, self.device = random.Random(seed), device
        shapes = ((2, 2, 4, 16), (2, 2, 4, 16), (2, 1, 4, 32))
        self.kv = [torch.zeros(NUM_BLOCKS + 1, *shape, device=device.torch_device) for shape in shapes]
        copies: PageCopies = make_copies(self.kv)
        page_bytes = sum(tensor[0].nbytes for tensor in self.kv)
        self.transfers = PageTransfers(
            device, copies, HostTierSizes(NUM_SLOTS, 0, staged, 5, page_bytes), NUM_BLOCKS
        )
        self.staged = staged
        self.blocks = [0.0] * NUM_BLOCKS
        self.slots: dict[int, float] = {}
        self.running: dict[int, tuple[HostLoad, dict[int, float]]] = {}
        self.finished: list[int] = []
        self.value = 0.0
        self.num_loads = 0

    def write(self, block: int) -> None:
        """As a step: whatever is enqueued before keeps the old content."""
        self.value += 1
        for tensor in self.kv:
            tensor[block].fill_(self.value)
        self.blocks[block] = self.value

    @property
    def busy(self) -> set[int]:
        """Blocks of loads that run."""
        return {int(block) for load, _ in self.running.values() for block in load.blocks}

    @property
    def pinned(self) -> set[int]:
        used = (np.concatenate([load.slots, load.saved_slots]) for load, _ in self.running.values())
        return {int(slot) for some in used for slot in some}

    def step(self) -> None:
        rng = self.rng
        finished, self.finished = tuple(self.finished), []
        arrived: dict[int, float] = {}
        for load_id in finished:
            arrived |= self.running.pop(load_id)[1]
        for block, value in arrived.items():
            self.blocks[block] = value
        free = [block for block in range(NUM_BLOCKS) if block not in self.busy]
        most = 2 * self.staged + 5 if rng.randrange(4) else self.staged  # more than the staging buffer holds
        gone = rng.sample(free, rng.randint(0, min(most, len(free))))
        slots = rng.sample([slot for slot in range(NUM_SLOTS) if slot not in self.pinned], len(gone))
        self.slots |= {slot: self.blocks[block] for slot, block in zip(slots, gone, strict=True)}
        loads = tuple(load for _ in range(rng.choice((0, 0, 1, 2))) if (load := self.load()) is not None)
        transfers = Transfers(ids(slots), ids(gone), loads, finished)
        rows = bool(rng.randrange(4))
        plan: StepPlan = dummy_plan(1, 0)
        none = ids([])
        plan = replace(plan, transfers=transfers, rows=plan.rows if rows else none)
        self.transfers.before(plan)
        busy = self.busy
        self.check({block: value for block, value in arrived.items() if block not in busy})
        if rows:
            left = [block for block in range(NUM_BLOCKS) if block not in busy]
            for block in [*gone, *rng.sample(left, min(5, len(left)))]:
                if block not in busy:
                    self.write(block)
        result = self.transfers.reporting(plan, lambda: empty_result(plan))()
        self.finished += result.loads_done

    def load(self) -> HostLoad | None:
        """Some slots go to blocks whose content is saved first."""
        rng = self.rng
        taken = self.busy
        sources = (
            rng.sample(sorted(self.slots), rng.randint(1, min(14, len(self.slots)))) if self.slots else []
        )
        free = [block for block in range(NUM_BLOCKS) if block not in taken]
        if not sources or len(free) < len(sources) + 6:
            return None
        blocks = rng.sample(free, len(sources))
        unused = [slot for slot in range(NUM_SLOTS) if slot not in self.pinned | set(sources)]
        saved = rng.sample(blocks, rng.randint(0, min(len(blocks), len(unused))))
        saved_slots = rng.sample(unused, len(saved))
        expected = {block: self.slots[slot] for slot, block in zip(sources, blocks, strict=True)}
        self.slots |= {slot: self.blocks[block] for slot, block in zip(saved_slots, saved, strict=True)}
        found = HostLoad(self.num_loads, ids(sources), ids(blocks), ids(saved_slots), ids(saved))
        self.running[self.num_loads] = (found, expected)
        self.num_loads += 1
        return found

    def check(self, expected: dict[int, float]) -> None:
        """Steps that are enqueued now read what loads have brought."""
        for block, value in expected.items():
            for tensor in self.kv:
                assert bool((tensor[block] == value).all()), f"block {block}"


def check_traffic(device: Device, make_copies: Any, num_steps: int) -> None:
    """For every device: random traffic ends with the bytes that it must."""
    num_loads = 0
    for seed in range(3):
        traffic = Traffic(device, make_copies, seed)
        for _ in range(num_steps):
            traffic.step()
        num_loads += traffic.num_loads
    assert num_loads > num_steps // 2


def test_random_traffic_arrives() -> None:
    check_traffic(CPU, ReferencePageCopies, 150)


def test_every_copy_waits_for_what_it_conflicts_with() -> None:
    """On simulated streams, whatever time a copy takes: see ``order.py``."""
    for seed in range(2):
        order = Order(seed)
        traffic = OrderedTraffic(order, seed)
        with order:
            for _ in range(60):
                traffic.step()
        assert traffic.num_loads > 15
        assert order.num_checked > 2_000


class OrderedTraffic(Traffic):
    """Traffic whose steps tell the order what they use."""

    def __init__(self, order: Order, seed: int) -> None:
        self.order = order
        super().__init__(OrderedDevice(order), order.copies, seed)
        order.know(self.transfers._staged, "staged")
        order.know(self.transfers._loaded, "loaded")
        for pages in self.transfers._host._pieces:
            order.know(pages, "slot")

    def write(self, block: int) -> None:
        super().write(block)
        self.order.use(("block", block), writes=True)

    def check(self, expected: dict[int, float]) -> None:
        super().check(expected)
        for block in expected:
            self.order.use(("block", block), writes=False)


def test_runs_of_slots_are_copied_at_once() -> None:
    pages = HostPages(CPU, 20, 2**28)  # 4 in each piece
    runs = [(begin, len(memory)) for begin, memory in pages.runs(ids([0, 1, 2, 3, 4, 5, 9, 11, 12]))]
    assert runs == [(0, 4), (4, 2), (6, 1), (7, 1), (8, 1)]
    slots = list(range(20))
    assert sum(len(memory) for _, memory in pages.runs(ids(slots))) == 20
    starts = {memory.data_ptr() for _, memory in pages.runs(ids(slots[::2]))}
    assert len(starts) == 10


# --------------------------------------------------------------------------- whole engines


def turns(count: int, seed: int, **sampling: Any) -> list[list[GenerateRequest]]:
    """Rounds of conversations that return: each prompt continues an earlier one, at some place of it."""
    rng = random.Random(seed)
    stems = [random_prompt(rng.randint(60, 260), seed=1000 + number) for number in range(10)]
    rounds = []
    for number in range(count):
        asked = []
        for place in range(rng.randint(1, 4)):
            stem = rng.choice(stems)
            stem = stem[: rng.choice((len(stem), len(stem), rng.randint(1, len(stem))))]
            tail = random_prompt(rng.randint(1, 30), seed=rng.randrange(2**30))
            own = {"seed": rng.randrange(2**30), "max_tokens": rng.randint(1, 20)} | sampling
            asked.append(request(f"t{number}.{place}", [*stem, *tail], **own))
        rounds.append(asked)
    return rounds


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[EngineCore]:
    core = make_engine(folder, max_model_len=320, **options)
    try:
        yield core
    finally:
        core.shutdown()


ROOMY = 0.02  # GiB: every page; 0.001: 130 pages of 16 tokens, which come and go


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        pytest.param({"kv_offloading_size": ROOMY}, 0.0, marks=pytest.mark.slow),
        ({"kv_offloading_size": 0.001, "async_scheduling": True}, 1.0),
        pytest.param(
            {"kv_offloading_size": ROOMY, "block_size": 4, "num_gpu_blocks_override": 200},
            1.0,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"kv_offloading_size": 0.001, "num_gpu_blocks_override": 40, "async_scheduling": True},
            0.0,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"kv_offloading_size": ROOMY, "kv_cache_dtype": "bfloat16"}, 1.0, marks=pytest.mark.slow
        ),
    ],
    ids=["greedy", "thrashing", "small blocks", "tiny pool", "another type"],
)
def test_tokens_equal_those_without_host_memory(
    checkpoint: Path, options: dict[str, Any], temperature: float
) -> None:
    pool = {"num_gpu_blocks_override": 60} | {
        key: value for key, value in options.items() if key != "kv_offloading_size"
    }
    cache = {key: options[key] for key in ("kv_cache_dtype",) if key in options}
    with engine(checkpoint, **pool | options) as core, engine(checkpoint, **cache) as plain:
        hits = 0
        for asked in turns(16, 3, temperature=temperature):
            assert tokens_of(run(core, asked)) == tokens_of(run(plain, asked))
        hits = core.stats().host_cache_hits
        assert hits > 300, core.stats()


def test_ranks_copy_their_own_pages(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two processes: half of the heads each, so half of the host's memory."""
    folder = write_checkpoint(tmp_path_factory.mktemp("ranks") / "random")
    asked = turns(6, 5)
    with engine(folder) as plain:
        expected = [tokens_of(run(plain, some)) for some in asked]
    options = {"num_gpu_blocks_override": 60, "kv_offloading_size": ROOMY, "async_scheduling": True}
    with engine(folder, tensor_parallel_size=2, **options) as core:
        assert [tokens_of(run(core, some)) for some in asked] == expected
        stats = core.stats()
        assert stats.host_cache_hits > 100
        assert core.limits.page_bytes * stats.host_pages_total <= ROOMY * 2**30


def test_a_draft_heads_keys_and_values_are_part_of_a_page(checkpoint: Path) -> None:
    core = head_engine(checkpoint, captures=False, kv_offloading_size=ROOMY)
    executor = core._executor
    assert isinstance(executor, LocalExecutor)
    assert executor._worker is not None
    transfers, head = executor._worker._transfers, drafting_of(core).head
    assert transfers is not None
    assert head is not None
    widths = sum(tensor[0].nbytes for tensor in (*executor._worker._kv, *head.kv))
    assert transfers._staged.shape[1] == widths
    before = torch.rand_like(head.kv[0, 3], dtype=torch.float32)
    head.kv[0, 3].copy_(before)
    plan = replace(dummy_plan(1, 0), transfers=Transfers(ids([7]), ids([3])))
    transfers.before(plan)
    head.kv[0, 3].zero_()
    load = HostLoad(0, ids([7]), ids([5]), ids([]), ids([]))
    transfers.before(replace(plan, transfers=Transfers(ids([]), ids([]), (load,))))
    assert torch.equal(head.kv[0, 5], before)


def test_no_host_memory_without_prefix_caching(checkpoint: Path) -> None:
    core = make_engine(checkpoint, kv_offloading_size=1.0, enable_prefix_caching=False)
    assert core.limits.num_host_slots == 0


def test_a_single_page_is_staged_alone() -> None:
    sizes = host_tier_sizes(EngineConfig(kv_offloading_size=1.5), KvGeometry(16, 2**30, 128), 64)
    assert sizes is not None
    assert (sizes.num_slots, sizes.saved, sizes.staged, sizes.loaded) == (1, 1, 1, 1)


def test_sizes_that_cannot_work_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-offloading-size 1e-09: a page of 16 tokens takes"):
        make_engine(checkpoint, kv_offloading_size=1e-9)
    with pytest.raises(ConfigError, match=r"1e\+06: .* of host memory for KV pages; .* are available"):
        make_engine(checkpoint, kv_offloading_size=1e6)
    check_host_memory(EngineConfig(), ModelConfig.load(checkpoint), 0)
