"""The expert layer of one rank among several, on one GPU: columns of all experts, or whole ones.

    python benchmarks/expert_shares.py [--tokens 1,8,64,256,512,8192] [--experts 32,128] [--ranks 2,4]
                                       [--skew 0.41] [--json FILE]

gpt-oss's sizes, random weights. Experts are chosen by lognormal popularities (standard deviation / mean:
--skew; 0: evenly), a fresh draw a call. Every rank's op, sorting and sum included, without the sum over
ranks, inside a CUDA graph of 24 calls: median microseconds a call, and the slowest rank's over that of
columns. A step waits for the slowest rank of each call, and ranks are timed over all calls: the ratio is a
lower bound for few tokens. Columns are those of the first rank, which has most.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from expert_kernels import CALLS, GPU, H, I, graph_us, words

from chorale.kernels.triton.moe.moe import moe
from chorale.kernels.triton.moe.packing import COLUMNS, ROWS, Experts, Matrices, Owned
from chorale.parallel.shares import CHUNK, cut


def random_part(count: int, inter: int, owned: Owned | None) -> Experts:
    """``count`` experts with ``inter`` columns. Any word is a valid packed word."""

    def matrices(rows: int, columns: int) -> Matrices:
        tiles, chunks = rows // ROWS, columns // COLUMNS
        scales = torch.randint(243, 247, (count, tiles, chunks, 8, 2, 2), dtype=torch.uint8, device=GPU)
        return Matrices(words(count, tiles, chunks, 32, 4), scales)

    def bias(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=GPU)

    gate_up, down = matrices(2 * inter, H), matrices(H, inter)
    bias_up, bias_down = bias(2, count, inter), bias(count, H)
    return Experts(gate_up, down, bias_up, bias_down, 7.0, 1.702, torch.bfloat16, owned=owned)


def draws(tokens: int, total: int, skew: float) -> list[torch.Tensor]:
    """What the router chooses in each of the calls: [T, 4] int64."""
    width = math.sqrt(math.log(1 + skew**2))
    found = []
    for _ in range(CALLS):
        popular = torch.randn(total, device=GPU) * width
        noise = -torch.log(-torch.log(torch.rand(tokens, total, device=GPU).clamp(1e-9, 1 - 1e-7)))
        found.append(torch.topk(noise + popular, 4, dim=1).indices)
    return found


def time_rank(experts: Experts, tokens: int, chosen: list[torch.Tensor], copies: int) -> float:
    """``copies`` of the weights take turns, so that few of them are in the L2."""
    layers = [experts, *(random_like(experts) for _ in range(copies - 1))]
    normed = torch.randn(tokens, H, device=GPU).bfloat16()
    gates, x = torch.full((tokens, 4), 0.25, device=GPU), torch.randn(tokens, H, device=GPU)

    def calls() -> None:
        for number, ids in enumerate(chosen):
            moe(normed, ids, gates, layers[number % copies], x, None, 1e-5)

    return graph_us(calls)


def random_like(experts: Experts) -> Experts:
    return random_part(experts.num_experts, experts.intermediate, experts.owned)


def compare(total: int, ranks: int, tokens: int, skew: float) -> dict[str, Any]:
    torch.manual_seed(tokens)
    chosen, copies = draws(tokens, total, skew), 2 if total > 64 else 4
    inter = len(cut(I, ranks, CHUNK, "columns")[0])
    columns = time_rank(random_part(total, inter, None), tokens, chosen, copies)
    shares = cut(total, ranks, 1, "experts")
    whole = [
        time_rank(random_part(len(own), I, Owned(own.start, total)), tokens, chosen, copies) for own in shares
    ]
    pairs = torch.stack([(ids < len(shares[0])).sum() for ids in chosen]).float()
    return {
        "experts": total, "ranks": ranks, "tokens": tokens, "columns_us": columns, "whole_us": whole,
        "slowest_us": max(whole), "first_rank_pairs": float(pairs.mean()) / (4 * tokens / ranks),
    }  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 16, 64, 256, 512, 2048, 8192])
    parser.add_argument("--experts", type=numbers, default=[32, 128])
    parser.add_argument("--ranks", type=numbers, default=[2])
    parser.add_argument("--skew", type=float, default=0.41)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for total in options.experts:
        for ranks in options.ranks:
            for tokens in options.tokens:
                row = compare(total, ranks, tokens, options.skew)
                rows.append(row)
                whole = " ".join(f"{us:.1f}" for us in row["whole_us"])
                case = f"{total:3} experts, {ranks} ranks, {tokens:5} tokens"
                ratio = row["slowest_us"] / row["columns_us"]
                print(f"{case}: columns {row['columns_us']:8.1f} us, whole {whole}; {ratio:.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
