"""Reinforcement learning (GRPO) of the demo: rollouts and weight updates through Chorale.

    pip install torch transformers safetensors      # beside chorale
    chorale serve demo --logprobs-mode processed_logprobs \
        --weight-transfer-config '{"backend": "checkpoint", "allowed_folders": ["/tmp/grpo"]}'
    python examples/grpo.py --folder /tmp/grpo

Or with server and trainer on one NVIDIA GPU, and the weights in its memory:

    chorale serve demo --dtype float32 --logprobs-mode processed_logprobs \
        --weight-transfer-config '{"backend": "ipc", "allow_pickled_handles": true}'
    python examples/grpo.py --ipc

The task: which of two numbers is larger? A rollout is the final message alone, without analysis; the reward
is 1 if the last number in it is the larger one. Each update draws new questions, takes a group of samples
for each with the server's log-probabilities, makes one step of policy gradient with transformers' model,
and lets the server read the trained tensors (attention, norms and routers, not experts, embedding and head)
from the folder or the GPU. The script prints how far the log-probabilities of the same tokens differ between
trainer and server.
"""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import random
import re
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import KEY, URL, model_name
from safetensors.torch import save_file
from torch.multiprocessing.reductions import reduce_tensor
from transformers import GptOssForCausalLM, Mxfp4Config

from chorale.model.demo import ensure_demo

FINAL = [200005, 17196, 200008]  # <|channel|>final<|message|>
TRAINED = ("self_attn", "norm", "router")
CLIP = 0.2  # limit of the ratio of new and old probability, as in PPO


def post(path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body or {}).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


@dataclass
class Rollout:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]  # of the server, for ``tokens``
    reward: float
    count: int = 1  # samples with these tokens: the trainer computes equal ones once
    advantage: float = 0.0


def rollouts(
    numbers: tuple[int, int], size: int, temperature: float, seed: int, version: str
) -> list[Rollout]:
    """Returns the samples for one question. Raises if they are not of the weights that are expected."""
    chat = {
        "model": model_name(),
        "messages": [{"role": "user", "content": f"Which is larger, {numbers[0]} or {numbers[1]}?"}],
        "reasoning_effort": "low",
    }
    prompt = post("/v1/chat/completions/render", chat)["token_ids"] + FINAL
    sampling = {"n": size, "temperature": temperature, "seed": seed, "max_tokens": 8, "logprobs": 0}
    sampling |= {"top_p": 1, "top_k": 0, "min_p": 0}
    asked = {"model": chat["model"], "token_ids": prompt, "output_mode": "text", "sampling_params": sampling}
    group: dict[tuple[int, ...], Rollout] = {}
    for choice in post("/inference/v1/generate", asked)["choices"]:
        tokens = choice["token_ids"]
        expected = [{"version": version, "start": 0, "end": len(tokens)}]
        if choice["weight_versions"] != expected:
            raise SystemExit(f"expected tokens of {expected}, got {choice['weight_versions']}")
        if tuple(tokens) in group:
            group[tuple(tokens)].count += 1
            continue
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        found = re.findall(r"\d+", choice["text"]) or [""]
        reward = float(found[-1] == str(max(numbers)))
        group[tuple(tokens)] = Rollout(prompt, tokens, logprobs, reward)
    rewards = [each.reward for each in group.values() for _ in range(each.count)]
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    for each in group.values():
        each.advantage = (each.reward - mean) / (spread + 1e-4)
    return list(group.values())


class Trainer:
    """transformers' model in float32, with Adam. Without ``folder``, on a GPU."""

    def __init__(self, folder: Path | None, rate: float, temperature: float) -> None:
        self.device = torch.device("cpu" if folder else "cuda")
        self.model = GptOssForCausalLM.from_pretrained(
            ensure_demo(), dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
        )
        self.model.float().to(self.device)  # transformers 5.17 leaves the experts in bfloat16
        self.trained = {
            name: each
            for name, each in self.model.named_parameters()
            if any(word in name for word in TRAINED)
        }
        for name, each in self.model.named_parameters():
            each.requires_grad = name in self.trained
        self.optimizer = torch.optim.Adam(self.trained.values(), lr=rate)
        self.folder, self.temperature = folder, temperature

    def logprobs(self, batch: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the log-probabilities of all tokens of ``batch``, those of one rollout after the other, and
        the number of each token's rollout."""
        length = max(len(each.prompt) + len(each.tokens) for each in batch)
        # Rows are filled up on the right, where causal attention does not look.
        rows = [each.prompt + each.tokens + [0] * length for each in batch]
        number = self.tensor([index for index, each in enumerate(batch) for _ in each.tokens])
        place = self.tensor([len(each.prompt) - 1 + at for each in batch for at in range(len(each.tokens))])
        tokens = self.tensor([token for each in batch for token in each.tokens])
        hidden = self.model.model(self.tensor([row[:length] for row in rows])).last_hidden_state
        logits = self.model.lm_head(hidden[number, place]) / self.temperature
        return logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1), number

    def tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    def step(self, batch: list[Rollout]) -> torch.Tensor:
        """Makes one step. Returns the differences between trainer and server before it, for each token."""
        ours, number = self.logprobs(batch)
        servers = self.tensor([each for rollout in batch for each in rollout.logprobs])
        advantage = self.tensor([each.advantage for each in batch])[number]
        weight = self.tensor([float(each.count) for each in batch])[number]
        ratio = (ours - servers).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        self.optimizer.zero_grad()
        (-(gain * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.optimizer.step()
        return (ours - servers).detach().abs().cpu()

    def update_info(self) -> dict[str, Any]:
        """Writes the trained tensors to the folder, or else makes handles of their memory; returns where they
        are."""
        tensors = {name: each.detach() for name, each in self.trained.items()}
        if self.folder:
            path = (self.folder / "update.safetensors").resolve()
            save_file(tensors, path)
            return {"path": str(path)}
        torch.cuda.synchronize()  # the server reads the memory as it is
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        handles = [{uuid: reduce_tensor(each)[1]} for each in tensors.values()]
        return {
            "names": list(tensors),
            "dtype_names": ["float32"] * len(tensors),
            "shapes": [list(each.shape) for each in tensors.values()],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }

    def send(self, version: str) -> None:
        """Lets the server read the trained tensors."""
        update = {"update_info": self.update_info()}
        post("/pause?mode=keep")
        post("/start_weight_update")
        post("/update_weights", update)
        post("/finish_weight_update", {"weight_version": version})
        post("/resume")


def chart(rewards: list[float], window: int = 5) -> str:
    """Returns an SVG: the mean reward of each update, and the mean of the last ``window``."""
    width, height, left, top = 640, 300, 56, 40
    count = max(len(rewards) - 1, 1)

    def at(update: int, reward: float) -> str:
        x, y = left + update * (width - left - 20) / count, top + (1 - reward) * (height - top - 50)
        return f"{x:.1f},{y:.1f}"

    means = [statistics.fmean(rewards[max(0, end - window) : end]) for end in range(1, len(rewards) + 1)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="22" font-size="14">'
        f"Mean reward of each update (dots), and of {window} (line)</text>",
    ]
    for reward in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, y), (end, _) = (at(update, reward).split(",") for update in (0, count))
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4}" text-anchor="end">{reward:.2f}</text>')
    for update in range(0, len(rewards), max(1, len(rewards) // 6)):
        x, y = at(update, 0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 18}" text-anchor="middle">{update + 1}</text>')
    for update, reward in enumerate(rewards):
        x, y = at(update, reward).split(",")
        parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="#7aa6d6"/>')
    line = " ".join(at(update, mean) for update, mean in enumerate(means))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f5fa8" stroke-width="2"/>')
    parts.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">update</text></svg>')
    return "\n".join(parts) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO with Chorale; see the head of the file.")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--folder", type=Path, help="one of the server's allowed_folders")
    place.add_argument("--ipc", action="store_true", help="train on the server's GPU, and send handles")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--questions", type=int, default=8, help="per update")
    parser.add_argument("--samples", type=int, default=8, help="per question")
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate of Adam")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chart", type=Path, help="where to write an SVG of the rewards")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    draw, trainer = random.Random(options.seed), Trainer(options.folder, options.rate, options.temperature)
    post("/init_weight_transfer_engine", {"init_info": {}})
    trainer.send("0")
    rewards: list[float] = []
    differences: list[torch.Tensor] = []
    print("update  reward  tokens  |trainer - server| mean, worst  seconds")
    for update in range(options.updates):
        started = time.monotonic()
        asked = [(*draw.sample(range(1, 1000), 2), draw.randrange(2**31)) for _ in range(options.questions)]
        with ThreadPoolExecutor(options.questions) as threads:
            groups = threads.map(
                lambda each, version=str(update): rollouts(
                    each[:2], options.samples, options.temperature, each[2], version
                ),
                asked,
            )
            batch = [rollout for group in groups for rollout in group]
        rewards.append(statistics.fmean(each.reward for each in batch for _ in range(each.count)))
        differences.append(trainer.step(batch))
        trainer.send(str(update + 1))
        now = differences[-1]
        print(
            f"{update + 1:6}  {rewards[-1]:6.3f}  {len(now):6}  {now.mean():.1e}, {now.max():.1e}"
            f"  {time.monotonic() - started:26.1f}",
            flush=True,
        )
    all_of = torch.cat(differences)
    first, last = statistics.fmean(rewards[:10]), statistics.fmean(rewards[-10:])
    print(f"mean reward: first 10 updates {first:.3f}, last 10 {last:.3f}")
    print(f"|trainer - server| over {len(all_of)} tokens: mean {all_of.mean():.1e}, worst {all_of.max():.1e}")
    if options.chart:
        options.chart.write_text(chart(rewards))


if __name__ == "__main__":
    main()
