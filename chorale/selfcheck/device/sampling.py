"""The sampler and the small ops of a step, on the device: against their definitions."""

from __future__ import annotations

import torch

from chorale.kernels.ops import NO_FINITE_LOGITS, NOTHING_ALLOWED, Allowed, SamplingInputs
from chorale.kernels.reference.sampling.sampling import ReferenceSampler
from chorale.selfcheck.check import Failed, Found
from chorale.selfcheck.device.machine import Machine

_ROWS = (1, 5, 64)
_DRAWS = 1024
_SHARES = (0.5, 0.25, 0.15, 0.1)  # of four tokens
_SIGMAS = 5.0


def check_sampling(machine: Machine) -> Found:
    """Raises ``Failed`` for the first difference."""
    with torch.inference_mode():
        sampler = _Sampler(machine)
        for rows in _ROWS:
            sampler.greedy(rows)
            sampler.seeded(rows)
        sampler.masks()
        off = sampler.frequencies()
        _check_pages(machine)
    counts = ", ".join(map(str, _ROWS))
    detail = (
        f"greedy, seeded, masked and forbidden tokens right at {counts} rows; {_DRAWS} draws at"
        f" temperature 1 within {off:.1f} standard deviations; pages are copied whole"
    )
    return Found(detail, {"standard_deviations": off})


class _Sampler:
    def __init__(self, machine: Machine) -> None:
        self._vocab, self._device = machine.model.vocab_size, machine.device
        self._forbidden = torch.zeros(self._vocab, dtype=torch.uint8)
        self._forbidden[self._vocab - 7 :] = 1
        self._make = machine.ops.make_sampler
        self._ours = self._make(self._forbidden.to(self._device), 64)
        self._generator = torch.Generator().manual_seed(3)

    def _logits(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self._vocab, generator=self._generator) * 3

    def _draw(
        self,
        logits: torch.Tensor,
        temperature: float,
        filters: torch.Tensor | None = None,
        allowed: Allowed | None = None,
    ) -> tuple[torch.Tensor, SamplingInputs]:
        """(tokens, what they were drawn by, on the CPU)."""
        rows = len(logits)
        keys = torch.randint(-(2**31), 2**31 - 1, (rows, 2), generator=self._generator).int()
        given = SamplingInputs(
            keys, torch.full((rows,), temperature), torch.arange(rows).int(), filters, allowed
        )
        device = self._device
        moved = SamplingInputs(
            given.keys.to(device),
            given.temperature.to(device),
            given.rows.to(device),
            None if filters is None else filters.to(device),
            None if allowed is None else Allowed(allowed.index.to(device), allowed.octets.to(device)),
        )
        last, out = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self._ours(logits.to(device), moved, last, out)
        if not torch.equal(last, out.clamp(min=0)):
            raise Failed("the sampled tokens are not those kept for the next step")
        return out.cpu(), given

    def greedy(self, rows: int) -> None:
        logits = self._logits(rows)
        found, _ = self._draw(logits, 0.0)
        expected = logits[:, : self._vocab - 7].argmax(-1)
        _same("greedy sampling", rows, found, expected)

    def seeded(self, rows: int) -> None:
        """With temperature and filters: the tokens that the noise's definition gives, to the bit."""
        logits = self._logits(rows)
        filters = torch.tensor([[self._vocab, 1.0, 0.0], [50, 0.9, 0.0], [self._vocab, 0.8, 0.02]])
        filters = filters.repeat(-(-rows // 3), 1)[:rows]
        found, given = self._draw(logits, 0.8, filters)
        last, expected = (torch.zeros(rows, dtype=torch.int64) for _ in range(2))
        ReferenceSampler(self._forbidden, 64)(logits, given, last, expected)
        _same("seeded sampling with filters", rows, found, expected)

    def masks(self) -> None:
        logits = self._logits(4)
        logits[2] = torch.nan
        octets = torch.zeros(2, -(-self._vocab // 8), dtype=torch.uint8)
        octets[0, 5] = 0b00010000  # token 44 alone
        index = torch.tensor([0, -1, -1, 1]).int()
        found, _ = self._draw(logits, 1.0, allowed=Allowed(index, octets))
        expected = [44, int(found[1]), NO_FINITE_LOGITS, NOTHING_ALLOWED]
        if found.tolist() != expected:
            raise Failed(
                f"rows with a grammar, without finite logits and without allowed tokens: {found.tolist()}"
            )

    def frequencies(self) -> float:
        """Returns the largest deviation of a token's count, in standard deviations."""
        logits = torch.full((64, self._vocab), -1e4)
        logits[:, 100:104] = torch.tensor(_SHARES).log()
        counts = torch.zeros(4)
        for _ in range(_DRAWS // 64):
            found, _ = self._draw(logits, 1.0)
            counts += torch.stack([(found == 100 + place).sum() for place in range(4)])
        shares = torch.tensor(_SHARES)
        sigmas = (counts - _DRAWS * shares).abs() / (_DRAWS * shares * (1 - shares)).sqrt()
        if float(sigmas.max()) > _SIGMAS or int(counts.sum()) != _DRAWS:
            raise Failed(
                f"{_DRAWS} draws at temperature 1 gave {counts.int().tolist()}, shares are {_SHARES}"
            )
        return float(sigmas.max())


def _same(what: str, rows: int, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found, expected):
        row = int((found != expected).nonzero()[0])
        raise Failed(
            f"{what}, {rows} rows: row {row} gave token {int(found[row])} instead of {int(expected[row])}"
        )


def _check_pages(machine: Machine) -> None:
    """Copies of blocks, for KV pages in host memory."""
    config, device = machine.model, machine.device
    shape = (9, 2, config.num_key_value_heads, machine.block_size, config.head_dim)
    octets = [torch.randint(0, 256, (*shape, machine.kv_dtype.itemsize), dtype=torch.uint8) for _ in range(2)]
    tensors = [each.to(device).view(machine.kv_dtype).view(shape) for each in octets]
    copies = machine.ops.page_copies(tensors)
    blocks = torch.tensor([7, 0, 3]).int().to(device)
    size = sum(tensor[0].nbytes for tensor in tensors)
    pages = torch.zeros(3, size, dtype=torch.uint8, device=device)
    copies.gather(blocks, pages)
    raw = [tensor.view(torch.uint8).view(9, -1) for tensor in tensors]
    if not torch.equal(pages, torch.cat([each[blocks.long()] for each in raw], 1)):
        raise Failed("blocks that were copied out of the KV cache are not what it holds")
    other = torch.tensor([1, 2, 8]).int().to(device)
    copies.scatter(pages, other)
    if not all(torch.equal(each[other.long()], each[blocks.long()]) for each in raw):
        raise Failed("blocks that were copied into the KV cache are not what was copied out of it")
