"""``batch_invariant`` of the Triton ops on a GPU: a token's bits, whatever else is in the step.

Layers of 20b's shape with random weights, on each number of rows, way to cut a prompt, and kind of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from chorale.kernels.ops import AttentionMeta, ForwardBatch
from chorale.measure.bench.checkpoint_writer import RandomSource
from chorale.model.config_writer import SHAPES, make_config
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import Loader, Target

pytestmark = pytest.mark.gpu
BLOCK, VOCAB, DEVICE = 64, 20_000, "cuda"
LENGTHS = (9300, 1, 63, 64, 65, 128, 129, 257, 700, 1300)
ROWS = (1, 2, 3, 8, 17, 64, 100, 256, 1024)
LAST = 20  # positions of each sequence that are compared
Part = tuple[int, int, int]  # a row: sequence, position of its first new token, number of new tokens


class Sequences:
    """The sequences of ``LENGTHS`` and their blocks."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = [torch.randint(0, VOCAB, (n,), generator=generator).to(DEVICE) for n in LENGTHS]
        counts = [-(-n // BLOCK) for n in LENGTHS]
        self.num_blocks = 2 * sum(counts)
        ids = torch.randperm(self.num_blocks, generator=generator).int().view(2, -1)
        self.tables = torch.zeros(2, len(LENGTHS), max(counts), dtype=torch.int32)
        for row, (count, end) in enumerate(zip(counts, torch.tensor(counts).cumsum(0).tolist(), strict=True)):
            self.tables[:, row, :count] = ids[:, end - count : end]

    def meta(self, parts: Sequence[Part], longest: int | None) -> AttentionMeta:
        rows = torch.tensor([sequence for sequence, *_ in parts])
        new = torch.tensor([count for *_, count in parts])
        contexts = torch.tensor([first + count for _, first, count in parts])
        positions = torch.cat([torch.arange(first, first + count) for _, first, count in parts])
        blocks = self.tables[:, rows.repeat_interleave(new), positions // BLOCK].long()
        slots = (blocks * BLOCK + positions % BLOCK).to(DEVICE)
        tables = self.tables[:, rows].to(DEVICE)
        return AttentionMeta(
            positions=positions.to(DEVICE),
            query_start=torch.cat((new.new_zeros(1), new.cumsum(0))).int().to(DEVICE),
            context_lens=contexts.int().to(DEVICE),
            block_tables=(tables[0], tables[1]),
            slots=(slots[0], slots[1]),
            max_query_len=int(new.max()),
            max_context_len=longest or int(contexts.max()),
        )


class Runs:
    """A model of two layers, and the logits of each sequence's last positions if it runs alone."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        from chorale.kernels.triton.ops import triton_ops

        torch.manual_seed(0)
        config = make_config(**(SHAPES["20b"] | {"layers": 2}), vocab=VOCAB)
        ops = triton_ops(batch_invariant=True)
        target = Target(config, ops, torch.bfloat16, torch.device(DEVICE))
        weights = Loader(RandomSource(config, DEVICE), target).weights(2, lambda *_: None)
        self.model, self.kv_dtype, self.sequences = (
            GptOss(config, weights, ops, 16_384),
            kv_dtype,
            Sequences(),
        )
        self.kv = self.pool()
        self.alone = [self.end_of(self.kv, number) for number in range(len(LENGTHS))]

    def pool(self) -> list[torch.Tensor]:
        """KV tensors that hold other values than zeros where nothing was written."""
        shape = self.sequences.num_blocks, 2, 8, BLOCK, 64
        count = self.model.config.num_kv_tensors
        return [(torch.randn(shape, device=DEVICE) * 50).to(self.kv_dtype) for _ in range(count)]

    def step(self, kv: list[torch.Tensor], parts: Sequence[Part], longest: int | None = None) -> torch.Tensor:
        """Returns the logits of the last ``LAST`` tokens of each row."""
        ids = torch.cat([self.sequences.tokens[s][first : first + count] for s, first, count in parts])
        places: list[int] = []
        end = 0
        for *_, count in parts:
            end += count
            places += range(end - min(count, LAST), end)
        index = torch.tensor(places, device=DEVICE)
        return self.model.forward(ForwardBatch(ids, index, self.sequences.meta(parts, longest)), kv)

    def end_of(self, kv: list[torch.Tensor], number: int) -> torch.Tensor:
        return self.step(kv, [(number, 0, LENGTHS[number])])

    def at(self, number: int, position: int) -> torch.Tensor:
        return self.alone[number][position - LENGTHS[number]]


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float8_e4m3fn], ids=["bfloat16", "e4m3"])
def runs(request: pytest.FixtureRequest) -> Runs:
    return Runs(request.param)


def test_prompts_of_one_step(runs: Runs) -> None:
    assert all(bool(logits.isfinite().all()) for logits in runs.alone)
    found = runs.step(runs.pool(), [(number, 0, length) for number, length in enumerate(LENGTHS)])
    assert torch.equal(found, torch.cat(runs.alone))


@pytest.mark.parametrize("longest", [None, 16_384])
@pytest.mark.parametrize("rows", ROWS)
def test_decodes(runs: Runs, rows: int, longest: int | None) -> None:
    generator = torch.Generator().manual_seed(rows)
    numbers = [0, *torch.randint(0, len(LENGTHS), (rows - 1,), generator=generator).tolist()]
    back = torch.randint(1, LAST + 1, (rows,), generator=generator).tolist()
    parts = [(n, LENGTHS[n] - min(b, LENGTHS[n]), 1) for n, b in zip(numbers, back, strict=True)]
    expected = torch.stack([runs.at(number, position) for number, position, _ in parts])
    assert torch.equal(runs.step(runs.kv, parts, longest), expected)


@pytest.mark.parametrize("chunk", [1, 5, 64, 500])
@pytest.mark.parametrize("number", [7, 9])
def test_chunks_beside_decodes(runs: Runs, number: int, chunk: int) -> None:
    length = LENGTHS[number]
    kv, first = runs.pool(), max(0, length - 4 * chunk)
    runs.end_of(kv, 0)
    if first:  # a prefix, as from the cache
        runs.step(kv, [(number, 0, first)])
    while first < length:
        count = min(chunk, length - first)
        found = runs.step(kv, [(0, LENGTHS[0] - 1, 1), (number, first, count)])
        assert torch.equal(found[0], runs.at(0, LENGTHS[0] - 1))
        first += count
    kept = min(count, LAST)
    assert torch.equal(found[1:], runs.alone[number][-kept:])


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("number", [0, 8])
def test_verified_drafts(runs: Runs, number: int, count: int) -> None:
    """Each token of a draft is a row of one token."""
    length, kv = LENGTHS[number], runs.pool()
    runs.step(kv, [(number, 0, length - count)])
    found = runs.step(kv, [(number, length - count + n, 1) for n in range(count)])
    assert torch.equal(found, runs.alone[number][-count:])
