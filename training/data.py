"""Batches from the corpus, made by worker processes while the GPU trains.

Every batch has the same shapes, so that kernels are compiled once: rows of ``seq_len`` tokens with several
dialogues packed into each, a fixed number of learned positions, and a fixed number of classes for the
softmax (the corrected tokens, the batch's targets, and a random sample of the rest of the vocabulary).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PAD = 199999  # <|endoftext|>
VOCAB_SIZE = 201088
NUM_TEXT_TOKENS = 199998
Array = npt.NDArray[Any]
Example = tuple[Array, Array, int]  # ids, learn, family


@dataclass(frozen=True, slots=True)
class BatchShape:
    rows: int = 32
    seq_len: int = 1024
    num_learned: int = 10240
    num_classes: int = 20480


def draw(seed: int) -> Example:
    from training.corpus import FAMILIES, sample

    dialogue = sample(seed)
    ids, learn = dialogue.tokens()
    return ids, learn, FAMILIES.index(dialogue.family)


class Packer:
    """Fills rows with dialogues in the order drawn, and gaps with the longest waiting one that fits."""

    def __init__(self, seeds: Iterator[int], shape: BatchShape, corrected: Array) -> None:
        self.seeds, self.shape, self.corrected = seeds, shape, corrected
        self.waiting: list[Example] = []
        self.rng = np.random.default_rng(next(seeds))
        self.seen_rest = np.setdiff1d(np.arange(NUM_TEXT_TOKENS, dtype=np.int64), corrected)

    def row(self) -> list[Example]:
        chosen: list[Example] = []
        left = self.shape.seq_len
        while len(self.waiting) < 64:
            example = draw(next(self.seeds))
            if len(example[0]) <= self.shape.seq_len:
                self.waiting.append(example)
        while self.waiting and len(self.waiting[0][0]) <= left:
            chosen.append(self.waiting.pop(0))
            left -= len(chosen[-1][0])
        while True:
            sizes = [len(example[0]) if len(example[0]) <= left else 0 for example in self.waiting]
            best = int(np.argmax(sizes)) if sizes else 0
            if not sizes or sizes[best] == 0:
                return chosen
            chosen.append(self.waiting.pop(best))
            left -= len(chosen[-1][0])

    def batch(self) -> dict[str, Array]:
        shape = self.shape
        token_ids = np.full((shape.rows, shape.seq_len), PAD, np.int32)
        positions = np.zeros((shape.rows, shape.seq_len), np.int32)
        learn = np.zeros((shape.rows, shape.seq_len), np.bool_)
        family = np.zeros((shape.rows, shape.seq_len), np.int32)
        for row in range(shape.rows):
            at = 0
            for ids, marks, kind in self.row():
                span = slice(at, at + len(ids))
                token_ids[row, span], learn[row, span] = ids, marks
                positions[row, span], family[row, span] = np.arange(len(ids)), kind
                at += len(ids)
            positions[row, at:] = np.arange(shape.seq_len - at)
        flat = np.flatnonzero(learn)
        if len(flat) > shape.num_learned:
            flat = np.sort(self.rng.choice(flat, shape.num_learned, replace=False))
        valid = len(flat)
        flat = np.pad(flat, (0, shape.num_learned - valid), constant_values=1)
        targets = token_ids.ravel()[flat]
        classes, bias = self.classes(targets)
        weight = np.zeros(shape.num_learned, np.float32)
        weight[:valid] = 1.0 / valid
        return {
            "token_ids": token_ids,
            "positions": positions,
            "predict": (flat - 1).astype(np.int32),
            "targets": targets,
            "target_class": np.searchsorted(classes, targets).astype(np.int32),
            "classes": classes.astype(np.int32),
            "bias": bias,
            "weight": weight,
            "family": family.ravel()[flat],
        }

    def classes(self, targets: Array) -> tuple[Array, Array]:
        """Returns (sorted ids, correction of each logit); sampled classes represent those not drawn."""
        sure = np.union1d(self.corrected, targets)
        extra = self.rng.choice(self.seen_rest, self.shape.num_classes, replace=False)
        extra = extra[~np.isin(extra, sure)][: self.shape.num_classes - len(sure)]
        classes = np.concatenate((sure, extra))
        bias = np.zeros(len(classes), np.float32)
        bias[len(sure) :] = np.log((VOCAB_SIZE - len(sure)) / len(extra))
        order = np.argsort(classes)
        return classes[order], bias[order]


def _seeds(start: int, stride: int) -> Iterator[int]:
    while True:
        yield start
        start += stride


def _work(out: Any, start: int, stride: int, shape: BatchShape, corrected: Array) -> None:
    packer = Packer(_seeds(start, stride), shape, corrected)
    while True:
        out.put(packer.batch())


def batches(
    seed: int, num_workers: int, shape: BatchShape, corrected: Array, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields batches on the device without end. The workers are daemons and end with the caller."""
    context = mp.get_context("fork")
    made = context.Queue(maxsize=2 * num_workers)
    for worker in range(num_workers):
        arguments = (made, seed * 10**9 + worker, num_workers, shape, corrected)
        context.Process(target=_work, args=arguments, daemon=True).start()
    ready: queue.Queue[dict[str, torch.Tensor]] = queue.Queue(maxsize=4)

    def pin() -> None:
        while True:
            batch = {name: torch.from_numpy(array) for name, array in made.get().items()}
            ready.put({k: t.pin_memory() if device.type == "cuda" else t for k, t in batch.items()})

    threading.Thread(target=pin, daemon=True).start()
    while True:
        batch = ready.get()
        yield {
            name: tensor.to(device, non_blocking=True) if tensor.is_floating_point()
            else tensor.to(device, non_blocking=True).long()
            for name, tensor in batch.items()
        }  # fmt: skip


def _count(span: tuple[int, int]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for seed in range(*span):
        counts.update(draw(seed)[0].tolist())
    return counts


def frequent_tokens(num_tokens: int, num_dialogues: int, num_workers: int) -> Array:
    """Returns the most frequent ids of the corpus, ascending; they get correction rows."""
    step = -(-num_dialogues // num_workers)
    spans = [(10**12 + i * step, 10**12 + (i + 1) * step) for i in range(num_workers)]
    if num_workers == 1 or (os.cpu_count() or 1) == 1:
        total = sum(map(_count, spans), Counter[int]())
    else:
        with mp.get_context("fork").Pool(num_workers) as pool:
            total = sum(pool.map(_count, spans), Counter[int]())
    return np.sort(np.asarray([token for token, _ in total.most_common(num_tokens)], np.int64))
