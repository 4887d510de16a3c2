"""Several ranks as threads of one process, with a communicator that meets at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from chorale.kernels import select_ops
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import Target, load_weights
from chorale.parallel.rank import Rank
from chorale.parallel.shares import Share, make_shares

Result = TypeVar("Result")
WAIT = 60.0  # seconds for the slowest rank


class Meeting:
    """Where the ranks of one test exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadCommunicator:
    """A ``Communicator`` between threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, len(meeting.parts)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._meeting.parts[self.rank] = tensor.clone()
        self._meeting.barrier.wait()
        found = torch.stack(self._meeting.parts)
        self._meeting.barrier.wait()  # nobody writes the next part before all have read this one
        return found

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        first, *others = self.all_gather(tensor).unbind(0)
        for part in others:
            first += part
        return tensor.copy_(first)

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def close(self) -> None:
        return None


def on_ranks(shares: tuple[Share, ...], work: Callable[[Rank], Result]) -> list[Result]:
    """Runs ``work`` on every rank at once and returns their results. An error of one ends the others."""
    meeting = Meeting(len(shares))

    def run(share: Share) -> Result:
        communicator = ThreadCommunicator(meeting, share.rank)
        try:
            with torch.inference_mode():
                return work(Rank(share, communicator))
        except BaseException:
            communicator.abort()
            raise

    with ThreadPoolExecutor(len(shares)) as pool:
        return [future.result() for future in [pool.submit(run, share) for share in shares]]


def load_shared(
    folder: Path, rank: Rank, ops: str = "reference", dtype: torch.dtype = torch.float32
) -> GptOss:
    """The model of one rank."""
    config = ModelConfig.load(folder)
    chosen = select_ops(ops, "cpu", rank=rank)
    weights = load_weights(folder, Target(config, chosen, dtype, share=rank.share))
    return GptOss(config.part(rank.share), weights, chosen, 4096)


def shares_of(folder: Path, size: int, *, by_expert: bool = False) -> tuple[Share, ...]:
    return make_shares(ModelConfig.load(folder), size, by_expert=by_expert)
