"""Train the demo checkpoint: ``python -m training.train --minutes 20 --out DIR`` on one GPU.

Writes ``DIR/demo.safetensors`` (the archive that ships), ``DIR/loss.json`` (the curve), with ``--keep`` the
weights in bfloat16 to continue from (``--resume DIR``), and with ``--evaluate N`` the held-out table.
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
from safetensors.torch import load_file, save_file

from chorale.harmony.vocab import VOCAB_SIZE, load_vocabulary
from chorale.model.demo.archive import demo_config
from training import optim
from training.corpus import FAMILIES
from training.data import BatchShape, batches, frequent_tokens
from training.export import write_archive
from training.features import token_features
from training.init import write_heads
from training.net import DemoNet, Table
from training.ops import TRAINING_OPS, StraightThrough, nearest_mxfp4
from training.restore import start_from

Batch = dict[str, torch.Tensor]


def sampled_loss(hidden: torch.Tensor, table: Table, batch: Batch) -> torch.Tensor:
    """Returns [L] cross-entropy over the batch's classes; ``bias`` corrects for those not drawn."""
    logits = (hidden.bfloat16() @ table(batch["classes"]).mT).float() + batch["bias"]
    return F.cross_entropy(logits, batch["target_class"], reduction="none")


def full_loss(hidden: torch.Tensor, table: Table, batch: Batch) -> torch.Tensor:
    """Returns [L] cross-entropy over the whole vocabulary."""
    rows = table(torch.arange(VOCAB_SIZE, device=hidden.device))
    return F.cross_entropy((hidden.bfloat16() @ rows.mT).float(), batch["targets"], reduction="none")


class Trainer:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.shape = BatchShape(rows=options.rows)
        vocab = load_vocabulary()
        features = torch.from_numpy(token_features([vocab.token_bytes(i) for i in range(VOCAB_SIZE)]))
        self.corrected = frequent_tokens(options.corrections, options.count_dialogues, options.workers)
        resumed = load_net(options.resume) if options.resume else None
        if resumed is not None:
            self.corrected = resumed["corrected"].numpy()
        # The workers are forked before CUDA starts.
        self.source = batches(options.seed + 1, options.workers, self.shape, self.corrected, device)
        torch.manual_seed(options.seed)
        self.net = DemoNet(demo_config(), features, torch.from_numpy(self.corrected))
        write_heads(self.net)
        if resumed is not None:
            self.net.load_state_dict(resumed)
        elif options.start:
            start_from(self.net, options.start)
        self.net.to(device)
        self.ops, self.sampled, self.full = TRAINING_OPS, sampled_loss, full_loss
        if device.type == "cuda":
            self._compile()
        self.optimizers = optim.build(self.net, options.lr_matrix, options.lr_rest)
        self.graphs: dict[tuple[bool, bool], torch.cuda.CUDAGraph] = {}
        self.static: Batch = {}
        self.curve: list[dict[str, Any]] = []
        self.by_family = torch.zeros(2, len(FAMILIES), device=device)

    def _compile(self) -> None:
        from training.fused import FusedOps

        shape = self.shape
        fused = FusedOps(shape.rows, shape.seq_len, self.net.config.sliding_window, self.device)
        self.ops = fused.record()
        self.sampled = torch.compile(sampled_loss, dynamic=False)
        nearest = torch.compile(nearest_mxfp4, dynamic=False)

        def round_experts(weight: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                rounded = nearest(weight)
            return StraightThrough.apply(weight, rounded)  # type: ignore[no-any-return, no-untyped-call]

        self.net.round_experts = round_experts

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
        self.log(step, elapsed)

    def log(self, step: int, elapsed: float) -> None:
        loss, count = self.by_family.tolist()
        self.by_family.zero_()
        mean = sum(loss) / max(sum(count), 1)
        worst = {
            family: round(one / n, 3) for family, one, n in zip(FAMILIES, loss, count, strict=True) if n > 0
        }
        self.curve.append({"step": step, "seconds": round(elapsed, 1), "loss": round(mean, 4)})
        shown = " ".join(f"{family}={value}" for family, value in worst.items())
        print(f"step {step} {elapsed:.0f} s loss {mean:.4f} {shown}", flush=True)

    def step(self, batch: Batch, progress: float) -> None:
        optim.set_share(self.optimizers, optim.schedule(progress))
        is_full = progress >= self.options.full_softmax_from
        if self.device.type != "cuda" or not self.options.graphs:
            self._work(batch, is_full)
            return
        for name, tensor in batch.items():
            if name in self.static:
                self.static[name].copy_(tensor)
            else:
                self.static[name] = tensor.clone()
        phase = (self.net.quantise, is_full)
        if phase not in self.graphs:
            self._capture(phase)
        else:
            self.graphs[phase].replay()

    def _capture(self, phase: tuple[bool, bool]) -> None:
        """Captures one step as a CUDA graph, since launching its kernels takes longer than running them.

        The first step of a phase runs three times, while kernels are compiled.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._work(self.static, phase[1])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._work(self.static, phase[1])
        self.graphs[phase] = graph

    def _work(self, batch: Batch, is_full: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        hidden = self.net(batch["token_ids"], batch["positions"], batch["predict"], self.ops)
        losses = (self.full if is_full else self.sampled)(hidden, self.net.table("unembed"), batch)
        (losses * batch["weight"]).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        valid = (batch["weight"] > 0).float()
        self.by_family[0].index_add_(0, batch["family"], losses.detach() * valid)
        self.by_family[1].index_add_(0, batch["family"], valid)


def save_net(net: DemoNet, folder: Path) -> None:
    """Writes bfloat16 weights in files of at most about 10 MB."""
    state = {k: v if v.dtype == torch.int64 else v.bfloat16() for k, v in net.state_dict().items()}
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(2)]
    for name, tensor in sorted(state.items(), key=lambda item: -item[1].numel()):
        smallest = min(shards, key=lambda shard: sum(t.numel() * t.itemsize for t in shard.values()))
        smallest[name] = tensor.detach().cpu().contiguous()
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"net-{index}.safetensors")


def load_net(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("net-*.safetensors")):
        state |= load_file(path)
    return {k: v if v.dtype == torch.int64 else v.float() for k, v in state.items()}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--rows", type=int, default=32, help="rows of 1,024 tokens in a batch")
    parser.add_argument("--corrections", type=int, default=3000, help="tokens with correction rows")
    parser.add_argument("--count-dialogues", type=int, default=40000)
    parser.add_argument("--lr-matrix", type=float, default=0.004)
    parser.add_argument("--lr-rest", type=float, default=0.003)
    parser.add_argument(
        "--quantise-from", type=float, default=0.5, help="share of the run after which experts are MXFP4"
    )
    parser.add_argument("--full-softmax-from", type=float, default=0.9)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", type=Path, help="a folder that --keep has written")
    begin.add_argument("--start", type=Path, help="an archive to train on from")
    parser.add_argument("--keep", action="store_true", help="also write the weights to go on from")
    parser.add_argument("--evaluate", type=int, default=0, help="held-out cases a family")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    trainer.run()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "loss.json").write_text(json.dumps(trainer.curve))
    write_archive(trainer.net, options.out / "demo.safetensors")
    if options.keep:
        save_net(trainer.net, options.out)
    if options.evaluate:
        from training.evaluate import Plan, evaluate

        evaluate(trainer.net, Plan(options.evaluate), options.out)


if __name__ == "__main__":
    main()
