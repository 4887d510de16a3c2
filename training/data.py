"""Batches from the corpus, made by worker processes while the GPU trains.

A batch holds dialogues of similar length, padded to one of a few lengths (so that compiled kernels see few
shapes), and has about ``tokens_per_batch`` tokens. Everything is a function of the seed and the number of
workers.
"""

from __future__ import annotations

import multiprocessing as mp
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.queues import Queue

import numpy as np
import numpy.typing as npt

LENGTHS = (96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768)
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: IntArray  # [B, S], padded with <|endoftext|>
    predict: IntArray  # [L] flat positions whose next token is learned
    targets: IntArray  # [L]


PAD = 199999


def _batch(rows: list[tuple[IntArray, npt.NDArray[np.bool_]]], length: int) -> Batch:
    token_ids = np.full((len(rows), length), PAD, np.int32)
    learn = np.zeros((len(rows), length), np.bool_)
    for index, (ids, marks) in enumerate(rows):
        token_ids[index, : len(ids)] = ids
        learn[index, : len(ids)] = marks
    row, column = np.nonzero(learn)
    return Batch(token_ids, (row * length + column - 1).astype(np.int32), token_ids[row, column])


def _work(queue: Queue[Batch], seed: int, stride: int, tokens_per_batch: int) -> None:
    from training.corpus import sample

    buckets: dict[int, list[tuple[IntArray, npt.NDArray[np.bool_]]]] = {length: [] for length in LENGTHS}
    while True:
        ids, learn = sample(seed).tokens()
        seed += stride
        fitting = [length for length in LENGTHS if length >= len(ids)]
        if not fitting:
            continue
        bucket = buckets[fitting[0]]
        bucket.append((ids, learn))
        if len(bucket) * fitting[0] >= tokens_per_batch:
            queue.put(_batch(bucket, fitting[0]))
            bucket.clear()


def batches(seed: int, num_workers: int, tokens_per_batch: int) -> Iterator[Batch]:
    """Without end; the workers are daemons and end with the caller."""
    context = mp.get_context("fork")
    queue: Queue[Batch] = context.Queue(maxsize=4 * num_workers)
    for worker in range(num_workers):
        start = seed * 10**9 + worker
        context.Process(target=_work, args=(queue, start, num_workers, tokens_per_batch), daemon=True).start()
    while True:
        yield queue.get()


def _count(span: tuple[int, int]) -> Counter[int]:
    from training.corpus import sample

    counts: Counter[int] = Counter()
    for seed in range(*span):
        counts.update(sample(seed).tokens()[0].tolist())
    return counts


def frequent_tokens(num_tokens: int, num_dialogues: int, num_workers: int) -> IntArray:
    """The ids that the corpus uses most, ascending: those that get correction rows."""
    step = -(-num_dialogues // num_workers)
    spans = [(10**12 + i * step, 10**12 + (i + 1) * step) for i in range(num_workers)]
    with mp.get_context("fork").Pool(num_workers) as pool:
        total: Counter[int] = sum(pool.map(_count, spans), Counter())
    return np.sort(np.asarray([token for token, _ in total.most_common(num_tokens)], np.int32))
