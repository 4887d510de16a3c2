"""Compares the fused ops with the plain ones on a GPU, forward and backward, and measures a step."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from training.ops import TRAINING_OPS
from training.train import Trainer, parse


def main() -> None:
    torch.set_float32_matmul_precision("high")
    options = parse(["--out", str(Path("build")), "--count-dialogues", "4000"])
    trainer = Trainer(options, torch.device("cuda"))
    batch = next(trainer.source)
    results = []
    for ops in (TRAINING_OPS, trainer.ops):
        started = time.perf_counter()
        hidden = trainer.net(batch["token_ids"], batch["positions"], batch["predict"], ops)
        losses = trainer.sampled(hidden, trainer.net.table("unembed"), batch)
        (losses * batch["weight"]).sum().backward()
        grads = {n: p.grad.clone() for n, p in trainer.net.named_parameters() if p.grad is not None}
        trainer.net.zero_grad(set_to_none=True)
        results.append((hidden.detach(), grads))
        print(ops.name, f"{time.perf_counter() - started:.0f} s", float((losses * batch["weight"]).sum()))
    (one, grads1), (two, grads2) = results
    print("hidden", float((one - two).norm() / one.norm()))
    for name, grad in grads1.items():
        error = float((grad - grads2[name]).norm() / (grad.norm() + 1e-12))
        if error > 0.1:
            print("gradient", name, error)
    for progress in (0.3, 0.7, 0.95):
        trainer.net.quantise = progress > 0.5
        for repeat in range(2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(10):
                trainer.step(next(trainer.source), progress)
            torch.cuda.synchronize()
            print(progress, repeat, f"{(time.perf_counter() - started) * 100:.1f} ms a step", flush=True)
    same = next(trainer.source)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        trainer.step(same, 0.3)
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    print(f"one batch again: {(time.perf_counter() - started) * 50:.1f} ms a step, host {host * 50:.1f} ms")
    print(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
