"""Scenarios of ``twins_ranks.py``: sampling over ranks in Triton's interpreter, one process per rank.

Each rank has the logits of its token ids and compares the common result with that of the single-rank kernels
on whole rows, which ``filter_twins.py`` compares with plain torch. Ranks exchange data in the kernels,
through shared memory; some scenarios run again with gloo.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chorale.engine.types import EARLY_STOPS
from chorale.kernels.ops import NO_FINITE_LOGITS, Allowed, SamplingInputs
from chorale.kernels.reference.sampling.noise import row_keys
from chorale.kernels.reference.sampling.shared_sampling import allowed_of
from chorale.kernels.triton.reduce import rows as exchange_module
from chorale.kernels.triton.reduce.memory import Layout
from chorale.kernels.triton.reduce.reducer import SymmetricReducer
from chorale.kernels.triton.reduce.rows import RowExchange
from chorale.kernels.triton.sampling.sample import sample
from chorale.kernels.triton.sampling.shared_sample import SharedSample
from chorale.kernels.triton.sampling.thresholds import thresholds
from chorale.kernels.triton.shared_ops import gather_few
from chorale.parallel.distributed import Gloo
from chorale.parallel.peer_memory import PeerMemory
from chorale.parallel.rank import Rank
from chorale.parallel.shares import CHUNK, Share, cut
from chorale.runtime.sampling.logprobs import gather_logprobs, shared_logprobs
from tests.support.kernels.ranks import SECONDS, on_ranks

V = 6013  # two pieces on each of two ranks, not all full
OFF = (float(V), 1.0, 0.0)
Filter = tuple[float, float, float]  # top_k, top_p, min_p
K: list[Filter] = [(k, 1.0, 0.0) for k in (1.0, 5.0, 50.0, 1024.0, 5000.0, V - 1.0)]
P: list[Filter] = [(float(V), p, 0.0) for p in (1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.99999)]
M: list[Filter] = [(float(V), 1.0, m) for m in (0.001, 0.1, 1.0)]
BOTH: list[Filter] = [(50.0, 0.5, 0.0), (300.0, 0.9, 0.01), (1024.0, 0.9, 0.1), (5000.0, 0.3, 0.0)]
BYTES_OF_ROUND, BYTES_OF_CHOICE = 80, 16  # bytes per row, to each peer


@dataclass
class Ranks:
    """One rank's state, and the number of bytes it sent."""

    rank: Rank
    reducer: SymmetricReducer
    in_kernels: bool
    sent: list[int] = field(default_factory=list)  # bytes sent to one peer, for each exchange

    @property
    def exchange(self) -> RowExchange | None:
        return self.reducer.rows if self.in_kernels else None

    @property
    def own(self) -> range:
        return self.rank.share.vocabulary


class Counted:
    """A communicator that counts the bytes it gathers."""

    def __init__(self, inner: Gloo, sent: list[int]) -> None:
        self._inner, self._sent = inner, sent
        self.rank, self.size = inner.rank, inner.size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._sent.append(tensor.nbytes)
        return self._inner.all_gather(tensor)


@dataclass
class Rows:
    """Rows of logits with all columns, and their sampling parameters."""

    logits: torch.Tensor
    draws: SamplingInputs
    forbidden: torch.Tensor

    def draws_of(self, own: range) -> SamplingInputs:
        """The parameters of one rank."""
        allowed = self.draws.allowed
        return self.draws if allowed is None else replace(self.draws, allowed=allowed_of(allowed, own))


def rows_of(filters: list[Filter], seed: int, *, step: float = 0.0, scale: float = 3.0) -> Rows:
    """``step``: makes scores multiples of it, so that many are equal, on both ranks."""
    count, generator = len(filters), torch.Generator().manual_seed(seed)
    logits = torch.randn(count, V, generator=generator) * scale
    temperature = torch.rand(count, generator=generator) + 0.5
    if step:
        logits = (logits / step).round() * step
        temperature.fill_(0.5)
    keys = torch.from_numpy(row_keys(np.arange(count, dtype=np.uint64) + 7, np.arange(count)))
    forbidden = torch.zeros(V, dtype=torch.uint8)
    forbidden[[3, V - 1]] = 1
    rows = torch.arange(count, dtype=torch.int32).flip(0)
    return Rows(logits, SamplingInputs(keys, temperature, rows, torch.tensor(filters)), forbidden)


def scores_of(rows: Rows) -> torch.Tensor:
    """Returns the scores [N, V] to which filters apply."""
    draws, count = rows.draws, len(rows.logits)
    scores = rows.logits / torch.where(draws.temperature > 0, draws.temperature, 1.0).unsqueeze(1)
    scores[:, rows.forbidden.bool()] = -torch.inf
    if draws.allowed is not None:
        bits = torch.from_numpy(np.unpackbits(draws.allowed.octets.numpy(), axis=1, bitorder="little"))
        for row, index in enumerate(draws.allowed.index.tolist()):
            if index >= 0:
                scores[row, bits[index, :V] == 0] = -torch.inf
    if draws.early_stops is not None:
        for row in range(count):
            stops = [stop for stop in draws.early_stops[row].tolist() if stop >= 0]
            scores[row, stops] = -torch.inf
    return torch.where(scores.isnan(), -torch.inf, scores)


def check(ranks: Ranks, rows: Rows) -> torch.Tensor:
    """Asserts that kept and drawn tokens equal those of a single rank. Returns the thresholds."""
    own, count = ranks.own, len(rows.logits)
    mine = rows.logits[:, own.start : own.stop].contiguous()
    local = rows.forbidden[own.start : own.stop].contiguous()
    edge = alone = thresholds(rows.logits, rows.draws, rows.forbidden)
    if ranks.exchange is not None:
        edge = thresholds(mine, rows.draws_of(own), local, own.start, V, ranks.exchange)
    scores = scores_of(rows)
    finite = scores.isfinite()
    kept, expected = (scores >= edge.unsqueeze(1)) & finite, (scores >= alone.unsqueeze(1)) & finite
    assert rows.draws.filters is not None
    for row, filters in enumerate(rows.draws.filters.tolist()):
        assert torch.equal(kept[row], expected[row]), (filters, kept[row].sum(), expected[row].sum())
    found, wanted = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    last, last_wanted = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    sampler = SharedSample(ranks.rank, rows.forbidden, count, ranks.exchange)
    sampler(mine, rows.draws, last, found)
    sample(rows.forbidden, rows.logits, rows.draws, last_wanted, wanted)
    assert torch.equal(found, wanted), (found, wanted)
    assert torch.equal(last, last_wanted)
    return torch.cat((edge, found.float()))


# ------------------------------------------------------------------ scenarios


def each(ranks: Ranks) -> list[torch.Tensor]:
    """Each filter alone and all together, with rows that have none."""
    return [check(ranks, rows_of([*K, OFF, *P, *M, *BOTH], seed=1))]


def ties(ranks: Ranks) -> list[torch.Tensor]:
    """Many tokens of both ranks have equal scores; then all tokens have."""
    stepped = rows_of([*K[:3], OFF, *P[2:5], *BOTH[:2], OFF], seed=2, step=0.5)
    stepped.draws.temperature[-1] = 0.0
    stepped.logits[-1, [V // 3, V - 2]] = 100.0  # one token of the first rank and one of the last
    found = [check(ranks, stepped)]
    equal = rows_of([K[2], P[3], M[1], BOTH[0]], seed=3)
    equal.logits.fill_(-1.25)
    return [*found, check(ranks, equal)]


def mixed(ranks: Ranks) -> list[torch.Tensor]:
    """Greedy rows, grammars, early stops, rows with no finite logit, with NaN, or with no allowed token."""
    rows = rows_of([K[2], OFF, P[3], BOTH[1], K[1], P[3], K[2], BOTH[1], OFF], seed=4)
    count = len(rows.logits)
    rows.draws.temperature[[1, 4]] = 0.0
    octets = torch.randint(0, 256, (3, -(-V // 8)), generator=torch.Generator().manual_seed(5))
    octets[1] = 0  # no token is allowed
    octets[2] = 0
    octets[2, -3:] = 255  # only tokens of the last rank are allowed
    index = torch.tensor([0, -1, 0, 2, 0, 1, -1, -1, 2], dtype=torch.int32)
    stops = torch.full((count, EARLY_STOPS), -1, dtype=torch.int32)
    stops[2, :2] = rows.logits[2].topk(2).indices.int()
    stops[8, 0] = V - 2
    draws = replace(rows.draws, allowed=Allowed(index, octets.to(torch.uint8)), early_stops=stops)
    rows = replace(rows, draws=draws)
    rows.logits[6, 17] = torch.nan
    rows.logits[7] = -torch.inf
    return [check(ranks, rows)]


def spread(ranks: Ranks) -> list[torch.Tensor]:
    """Scores for which a threshold is hard to find: of all magnitudes, huge, tiny, close to each other."""
    filters = [K[2], P[3], BOTH[1], K[3], P[5], BOTH[0]]
    rows = rows_of(filters, seed=6)
    rows.draws.temperature.fill_(1.0)
    generator = torch.Generator().manual_seed(7)
    magnitudes = torch.rand(3, V, generator=generator) * 70 - 35
    rows.logits[:3] = torch.randn(3, V, generator=generator).sign() * 10**magnitudes
    rows.logits[3] *= 1e-30
    rows.logits[4] = 5.0 + rows.logits[4] * 1e-6
    rows.logits[5] = torch.where(rows.logits[5] > 0, 1e38, -1e38)
    return [check(ranks, rows)]


def cost(ranks: Ranks) -> list[torch.Tensor]:
    """Checks the bytes sent: several rounds for rows with filters, only the choice for rows without."""
    size, rows = ranks.rank.share.size, rows_of([OFF, P[3]], seed=8)
    store4, sent = exchange_module.store4, ranks.sent

    def counted(address: Any, there: Any, words: Any, SEND: Any, ASM: Any) -> None:
        if SEND:
            sent.append(16 * int(there.handle.data.sum()))
        store4(address, there, words, SEND, ASM)

    exchange_module.store4 = counted  # type: ignore[assignment]
    own = ranks.own
    mine = rows.logits[:, own.start : own.stop].contiguous()
    out, last = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    SharedSample(ranks.rank, rows.forbidden, 2, ranks.exchange)(mine, rows.draws, last, out)
    exchange_module.store4 = store4
    rounds = [n for n in sent if n == BYTES_OF_ROUND]
    assert sorted(set(sent)) == [BYTES_OF_CHOICE, BYTES_OF_ROUND], sent
    assert sent.count(BYTES_OF_CHOICE) == 2 * (size - 1)
    assert len(rounds) <= 6 * (size - 1), len(rounds)  # the worst case is 13
    print(f"  {len(rounds) / (size - 1):.1f} rounds of a row with a filter", flush=True)
    return []


def logprobs(ranks: Ranks) -> list[torch.Tensor]:
    """Log-probabilities need two exchanges of a few numbers, which replace the communicator's here."""
    rows, own, num_top = rows_of([OFF] * 3, seed=10).logits, ranks.own, 5
    gather = ranks.rank.communicator.all_gather
    if ranks.in_kernels:
        gather = partial(gather_few, ranks.rank, ranks.reducer)
    tokens = torch.tensor([5, V - 1, V // 2])
    rows[2, [7, V - 7]] = 50.0  # equal alternatives, one on each rank
    mine = rows[:, own.start : own.stop]
    for named in (torch.tensor([[V - 1, 0, V // 2]]), None):
        ranks.sent.clear()
        found = shared_logprobs(own, gather, mine, tokens, num_top, named)
        wanted = gather_logprobs(rows, tokens, num_top, named)
        for part, one_rank in zip(found, wanted, strict=True):
            torch.testing.assert_close(part, one_rank, rtol=1e-5, atol=1e-5)
    assert len(ranks.sent) == (0 if ranks.in_kernels else 2)
    assert sum(ranks.sent) in (0, 3 * (8 + 8 * num_top) + 3 * 4)
    return [tensor.float() for tensor in found]


def absent(ranks: Ranks) -> list[torch.Tensor]:
    """The last rank is absent: the others return, name the rank, and have no token."""
    last, rows = ranks.rank.share.size - 1, rows_of([OFF, K[2], P[3]], seed=9)
    if ranks.rank.share.rank == last:
        return []
    own = ranks.own
    ranks.reducer.set_limit(0.05)
    out, kept = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    mine = rows.logits[:, own.start : own.stop].contiguous()
    SharedSample(ranks.rank, rows.forbidden, 3, ranks.exchange)(mine, rows.draws, kept, out)
    assert ranks.reducer.missing == last, ranks.reducer.missing
    assert out.tolist() == [NO_FINITE_LOGITS] * 3, out
    return []


SCENARIOS: dict[str, Callable[[Ranks], list[torch.Tensor]]] = {
    "each": each,
    "ties": ties,
    "mixed": mixed,
    "spread": spread,
    "cost": cost,
    "logprobs": logprobs,
    "absent": absent,
}
WITH_GLOO = ("mixed", "logprobs")


# ------------------------------------------------------------------ ranks


def run(size: int, scenarios: list[str]) -> None:
    layout = Layout(size, 64, 64, 8, torch.float32)
    buffers = [torch.zeros(layout.num_bytes // 4, dtype=torch.int32).share_memory_() for _ in range(size)]
    cases = [(name, True) for name in scenarios] + [(name, False) for name in scenarios if name in WITH_GLOO]

    def work(rank: int, send: Callable[[list[str]], None]) -> None:
        gloo = Gloo(Path(folder) / "store", rank, size)
        addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])

        def meet() -> None:
            gloo.all_gather(torch.zeros(1))

        memory = PeerMemory(rank, size, buffers[rank], addresses, meet)
        whole = Share(rank, size, *[range(1)] * 4, cut(V, size, CHUNK, "token ids")[rank], num_experts=1)
        for name, in_kernels in cases:
            sent: list[int] = []
            reducer = SymmetricReducer(memory, layout, SECONDS)
            ranks = Ranks(Rank(whole, Counted(gloo, sent)), reducer, in_kernels, sent)  # type: ignore[arg-type]
            found = SCENARIOS[name](ranks)
            meet()
            if name != "absent":
                reducer.check()
                assert bool((buffers[rank][layout.numbers // 4 :] == -1).all())  # all words have been cleared
            meet()
            send([hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in found])

    labels = [f"{name}, {'in kernels' if in_kernels else 'gloo'}" for name, in_kernels in cases]
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(size, labels, work)
