"""Train the demo checkpoint: ``python -m training.train --minutes 15 --out DIR`` on one GPU.

Writes ``DIR/demo.safetensors`` (the archive that ships), ``DIR/loss.json`` (the curve)
and, with ``--keep``, ``DIR/net.safetensors`` to go on from (``--resume``).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from chorale.demo.archive import demo_config
from chorale.demo.features import token_features
from chorale.harmony.vocab import load_vocabulary
from chorale.kernels.ops import Ops
from training import ops as training_ops
from training import optim
from training.data import Batch, batches, frequent_tokens
from training.net import DemoNet


def class_loss(
    hidden: torch.Tensor,
    unembedding: torch.Tensor,
    targets: torch.Tensor,
    common: torch.Tensor,
    num_random: int,
) -> torch.Tensor:
    """Cross-entropy over the targets, the common tokens and a fresh random sample of all the others.

    ``num_random`` 0 means the whole vocabulary.
    """
    if num_random == 0:
        return F.cross_entropy((hidden.bfloat16() @ unembedding.mT).float(), targets)
    drawn = torch.randint(unembedding.shape[0], (num_random,), device=targets.device)
    classes = torch.unique(torch.cat((common, targets, drawn)))
    logits = hidden.bfloat16() @ unembedding[classes].mT
    return F.cross_entropy(logits.float(), torch.searchsorted(classes, targets))


def compiled_ops() -> Ops:
    """The training ops with their element-wise chains fused."""
    base = training_ops.TRAINING_OPS
    return replace(
        base,
        attention=torch.compile(training_ops.attention, dynamic=True),
        qkv_rope_cache=base.qkv_rope_cache,
        moe=torch.compile(training_ops.moe, dynamic=True),
    )


class Trainer:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        vocab = load_vocabulary()
        features = torch.from_numpy(token_features([vocab.token_bytes(i) for i in range(201088)]))
        corrected = torch.from_numpy(
            frequent_tokens(options.corrections, options.count_dialogues, options.workers).astype(np.int64)
        )
        torch.manual_seed(options.seed)
        self.net = DemoNet(demo_config(), features, corrected).to(device)
        if options.resume:
            self.net.load_state_dict(load_file(options.resume), strict=True)
        self.ops = compiled_ops() if options.compile else training_ops.TRAINING_OPS
        self.optimizers = optim.build(self.net, options.lr_matrix, options.lr_rest)
        self.curve: list[dict[str, float]] = []

    def run(self) -> None:
        options = self.options
        source = batches(options.seed + 1, options.workers, options.tokens)
        started, step, window = time.perf_counter(), 0, []
        budget = options.minutes * 60
        while (elapsed := time.perf_counter() - started) < budget and step < options.max_steps:
            progress = max(elapsed / budget, step / options.max_steps)
            self.net.quantise = progress >= options.quantise_from
            window.append(self.step(next(source), progress))
            step += 1
            if step % options.log_every == 0:
                loss = float(torch.stack(window).mean())
                self.curve.append({"step": step, "seconds": round(elapsed, 1), "loss": round(loss, 4)})
                print(f"step {step} {elapsed:.0f} s loss {loss:.4f}", flush=True)
                window = []
        self.net.quantise = True

    def step(self, batch: Batch, progress: float) -> torch.Tensor:
        share = optim.schedule(progress)
        token_ids = torch.from_numpy(batch.token_ids).to(self.device, non_blocking=True).long()
        predict = torch.from_numpy(batch.predict).to(self.device, non_blocking=True).long()
        targets = torch.from_numpy(batch.targets).to(self.device, non_blocking=True).long()
        hidden = self.net(token_ids, predict, self.ops)
        num_random = 0 if progress > self.options.full_softmax_from else self.options.negatives
        loss = class_loss(hidden.states, hidden.unembedding, targets, self.net.corrected, num_random)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("peak", group["lr"])
                group["lr"] = group["peak"] * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--tokens", type=int, default=65536, help="tokens in a batch, padding included")
    parser.add_argument("--corrections", type=int, default=7000, help="tokens with correction rows")
    parser.add_argument("--count-dialogues", type=int, default=40000)
    parser.add_argument("--negatives", type=int, default=16384)
    parser.add_argument("--lr-matrix", type=float, default=0.01)
    parser.add_argument("--lr-rest", type=float, default=0.003)
    parser.add_argument(
        "--quantise-from", type=float, default=0.5, help="share of the run after which experts are MXFP4"
    )
    parser.add_argument("--full-softmax-from", type=float, default=0.9)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--keep", action="store_true", help="also write net.safetensors")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    from training.export import write_archive

    options = parse(arguments)
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    trainer.run()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "loss.json").write_text(json.dumps(trainer.curve))
    write_archive(trainer.net, options.out / "demo.safetensors")
    if options.keep:
        state = {k: v.contiguous().cpu() for k, v in trainer.net.state_dict().items()}
        save_file(state, options.out / "net.safetensors")


if __name__ == "__main__":
    main()
