"""Train the demo checkpoint's head: ``python -m training.head.train --minutes 5 --out build/head``.

Writes ``head.safetensors`` (the archive that ships), ``loss.json`` and, with ``--evaluate N``,
``acceptance.json`` and ``acceptance.md``. Each step drafts ``--steps`` tokens from every position of the
answers, as in use: the head's own states are fed back (EAGLE3's "training-time test"). It learns the
target's distribution over the draft vocabulary on the answers of the corpus, which the demo checkpoint mostly
reproduces.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from chorale.harmony.vocab import VOCAB_SIZE
from chorale.kernels.ops import Ops
from chorale.model.demo import ARCHIVE
from training import optim
from training.data import batches
from training.head.cpu_ops import CPU_OPS
from training.head.data import Anchors, batch_shape, draft_vocabulary, find_anchors, learned_positions
from training.head.export import read_head, write_head
from training.head.net import Chain, HeadNet, HeadShape, Sources, write_start
from training.head.target import Target, joined
from training.restore import restore

Batch = dict[str, torch.Tensor]


class Trainer:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        vocabulary = torch.from_numpy(draft_vocabulary(options.vocabulary, options.count_dialogues))
        shape = batch_shape(options.rows, options.seq_len)
        # The workers are forked before CUDA starts.
        nothing = vocabulary[:0].numpy()
        self.source = batches(options.seed + 17, options.workers, shape, nothing, device)
        torch.manual_seed(options.seed)
        demo = restore(options.archive).to(device)
        self.target = Target(demo, self._ops(demo.config.sliding_window))
        draft_ids, order = vocabulary.sort()
        corrected = torch.argsort(order)[: options.corrections].sort().values
        rows = self.target.unembedding[draft_ids.to(device)].cpu()
        self.net = HeadNet(HeadShape(boundaries=options.boundaries), draft_ids, rows, corrected)
        self.known = torch.zeros(VOCAB_SIZE, dtype=torch.bool, device=device)
        if options.start:
            self.net = read_head(options.start, self.target.unembedding.cpu())
            self.net.quantise = False
        else:
            self._start()
        self.net.to(device)
        self.known[self.net.draft_ids] = True
        self.rows_of_target = self.net.unembedding.bfloat16()
        self.optimizers = optim.build(self.net, options.lr_matrix, options.lr_rest)
        self.curve: list[dict[str, Any]] = []
        self.sums = torch.zeros(
            options.steps, 4, device=device
        )  # tokens, loss, agreeing drafts, drafts that agree up to this step

    def _ops(self, window: int) -> Ops:
        if self.device.type != "cuda":
            return CPU_OPS
        from training.fused import FusedOps

        return FusedOps(self.options.rows, self.options.seq_len, window, self.device).record()

    def _start(self) -> None:
        batch = next(self.source)
        states = self.target.states(batch["token_ids"], batch["positions"])
        scales = torch.stack([states[one].square().mean().sqrt() for one in self.net.shape.boundaries])
        write_start(self.net, scales.cpu(), self.target.final_norm.cpu())

    def run(self) -> None:
        options = self.options
        started, step = time.perf_counter(), 0
        budget = options.minutes * 60
        while (elapsed := time.perf_counter() - started) < budget and step < options.max_steps:
            progress = max(elapsed / budget, step / options.max_steps)
            self.net.quantise = progress >= options.quantise_from
            self.step(next(self.source), progress)
            step += 1
            if step % options.log_every == 0 or step == 20:
                self.log(step, elapsed)
        self.net.quantise = True
        self.log(step, time.perf_counter() - started)

    def log(self, step: int, elapsed: float) -> None:
        count, loss, agreed, chained = self.sums.mean(0).tolist(), *self.sums.T[1:].tolist()
        del count
        counts = self.sums[:, 0].clamp(min=1).tolist()
        row = {
            "step": step,
            "seconds": round(elapsed, 1),
            "loss": [round(a / n, 4) for a, n in zip(loss, counts, strict=True)],
            "agreed": [round(a / n, 4) for a, n in zip(agreed, counts, strict=True)],
            "length": round(1 + sum(chained) / counts[0], 3),
        }
        self.sums.zero_()
        self.curve.append(row)
        print(json.dumps(row), flush=True)

    def step(self, batch: Batch, progress: float) -> None:
        optim.set_share(self.optimizers, optim.schedule(progress, decay_from=self.options.decay_from))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()

    def loss(self, batch: Batch) -> torch.Tensor:
        options, net, target = self.options, self.net, self.target
        token_ids, positions = batch["token_ids"], batch["positions"]
        size = (int(options.anchors * token_ids.shape[1]), options.steps)
        anchors = find_anchors(token_ids, positions, learned_positions(batch), self.known, size)
        states = target.states(token_ids, positions)
        embedded = F.embedding(token_ids.roll(-1, 1), target.embedding)
        matrices = net.matrices()
        sources = Sources(joined(states, net.shape.boundaries), embedded, positions)
        chain = Chain(net, matrices, sources, anchors.index)
        final = target.final(states[-1])
        total = torch.zeros((), device=self.device)
        chained = torch.ones(anchors.index.shape, dtype=torch.bool, device=self.device)
        for step in range(options.steps):
            if step:
                chain.advance(F.embedding(anchors.targets[..., step - 1], target.embedding))
            some = anchors.valid[..., step].nonzero(as_tuple=True)
            teacher = final[some[0], anchors.index[some] + 1 + step] @ self.rows_of_target.mT
            logits = net.logits(chain.x[some], matrices)
            losses = F.cross_entropy(logits, teacher.float().softmax(-1), reduction="none")
            total = total + options.decay**step * losses.sum()
            self._count(step, losses, logits, anchors, some, chained)
        return total / anchors.valid[..., 0].sum().clamp(min=1)

    @torch.no_grad()
    def _count(
        self,
        step: int,
        losses: torch.Tensor,
        logits: torch.Tensor,
        anchors: Anchors,
        some: tuple[torch.Tensor, ...],
        chained: torch.Tensor,
    ) -> None:
        agreed = self.net.draft_ids[logits.argmax(-1)] == anchors.targets[..., step][some]
        kept = agreed & chained[some]
        chained[:] = False
        chained[some] = kept
        row = (torch.ones_like(losses), losses, agreed, kept)
        self.sums[step] += torch.stack([one.float().sum() for one in row])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--archive", type=Path, default=ARCHIVE, help="the target")
    parser.add_argument("--start", type=Path, help="a head to train on from, of the same sizes")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--rows", type=int, help="of a batch; default 32 on a GPU, 8 on a CPU")
    parser.add_argument("--seq-len", type=int, help="tokens of a row; default 1024 on a GPU, 512 on a CPU")
    parser.add_argument(
        "--anchors", type=float, default=0.3, help="positions that draft, as a share of a row"
    )
    parser.add_argument("--steps", type=int, default=4, help="tokens of a draft")
    parser.add_argument(
        "--decay", type=float, default=0.9, help="weight of each token of a draft relative to the last"
    )
    parser.add_argument("--boundaries", type=_numbers, default=HeadShape().boundaries, metavar="1,4,6")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--corrections", type=int, default=1024, help="draft tokens with rows of their own")
    parser.add_argument("--count-dialogues", type=int, default=40000)
    parser.add_argument("--lr-matrix", type=float, default=0.004)
    parser.add_argument("--lr-rest", type=float, default=0.003)
    parser.add_argument("--quantise-from", type=float, default=0.7)
    parser.add_argument(
        "--decay-from", type=float, default=0.3, help="share of the run after which rates fall"
    )
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--evaluate", type=int, default=0, help="held-out conversations a family")
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    options.rows = options.rows or (32 if on_gpu else 8)
    options.seq_len = options.seq_len or (1024 if on_gpu else 512)
    return options


def _numbers(given: str) -> tuple[int, ...]:
    return tuple(int(one) for one in given.split(","))


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(options, torch.device(options.device))
    trainer.run()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "loss.json").write_text(json.dumps(trainer.curve, indent=0))
    write_head(trainer.net, options.out / "head.safetensors")
    if options.evaluate:
        from training.head.evaluate import evaluate

        evaluate(Target(trainer.target.net), trainer.net, options.evaluate, options.out)


if __name__ == "__main__":
    main()
