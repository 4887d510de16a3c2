"""Loads and unloads adapters at random while requests run: errors, memory, and the gaps of a stream.

    python -m benchmarks.serving.adapters [--minutes 10] [--adapters 200] [--clients 6] [-- serve's options]

A server of the demo on a CPU. Each client owns a part of the adapters: it loads one, asks it, unloads it or
leaves it there, in a random order, and aborts some of its requests. One more client streams from the base
model. Prints a line a minute: requests, loads, errors, the resident memory of all processes, and the median,
99th percentile and longest gap between two tokens of the stream. ``--clients 0``: adapters are loaded and
unloaded, and none is asked, which shows what loading alone does to a stream. The exit code is 1 after an
error, or if memory has grown by 5 % since the second minute.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from chorale.model.config import ModelConfig
from chorale.model.demo import ensure_demo
from tests.support.device.lora import write_adapter
from tests.support.processes import descendants
from tests.support.served import serving

FORMS = ("attention", "attention", "router", "tinker")


@dataclass
class Load:
    url: str
    folder: Path
    end: float  # monotonic time
    count: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    gaps: list[float] = field(
        default_factory=list
    )  # seconds between tokens of the stream, since the last line

    def post(self, path: str, **body: Any) -> HTTPResponse:
        data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        found: HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(self.url + path, data, kind), timeout=300
        )
        return found

    def use(self, seed: int, names: list[str], *, asks: bool) -> None:
        """One client, until the end."""
        draw, loaded = random.Random(seed), set[str]()
        while time.monotonic() < self.end:
            name = draw.choice(names)
            try:
                if name not in loaded:
                    self.post(
                        "/v1/load_lora_adapter", lora_name=name, lora_path=str(self.folder / name)
                    ).read()
                    self.count["loads"] += 1
                    loaded.add(name)
                if asks:
                    self._ask(name, draw)
                if draw.random() < 0.5:
                    self.post("/v1/unload_lora_adapter", lora_name=name).read()
                    loaded.remove(name)
            except (OSError, AssertionError, ValueError) as error:
                text = error.read().decode() if isinstance(error, urllib.error.HTTPError) else repr(error)
                self.errors.append(f"{name}: {text[:300]}")

    def _ask(self, name: str, draw: random.Random) -> None:
        prompt = [draw.randrange(1000, 5000) for _ in range(draw.randrange(1, 60))]
        body = {"model": name, "prompt": prompt, "max_tokens": draw.randrange(1, 24), "ignore_eos": True}
        self.count["requests"] += 1
        if draw.random() < 0.1:  # leave in the middle
            with self.post("/v1/completions", **body, stream=True) as answer:
                answer.readline()
            return
        with self.post("/v1/completions", **body) as answer:
            usage = json.load(answer)["usage"]
        assert usage["completion_tokens"] == body["max_tokens"], usage

    def stream(self) -> None:
        body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
        while time.monotonic() < self.end:
            before = None
            with self.post("/v1/completions", **body) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        now = time.monotonic()
                        self.gaps += [] if before is None else [now - before]
                        before = now


def resident(pid: int) -> float:
    """Returns MiB of a process and of its descendants."""
    pages = (int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in (pid, *descendants(pid)))
    return sum(pages) / 256


def line(load: Load, minute: int, pid: int) -> float:
    gaps, load.gaps, memory = sorted(load.gaps), [], resident(pid)
    times = [statistics.median(gaps), gaps[len(gaps) * 99 // 100], gaps[-1]] if gaps else []
    shown = " / ".join(f"{1000 * each:.0f}" for each in times)
    print(
        f"minute {minute}: {dict(load.count)}, {len(load.errors)} errors, {memory:.0f} MiB, gaps {shown} ms",
        flush=True,
    )
    return memory


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("options", nargs="*")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as where:
        folder, config = Path(where), ModelConfig.load(ensure_demo())
        names = [f"a{number}" for number in range(given.adapters)]
        for number, name in enumerate(names):
            write_adapter(folder / name, config, FORMS[number % len(FORMS)], number)
        flags = ["--enable-lora", "--max-loras", "8", "--max-cpu-loras", "40", "--lora-dirs", str(folder)]
        flags += ["--allow-runtime-lora-updating", "--device", "cpu", "--response-store", ":memory:"]
        # Few pages, all of which are written in the first minute: memory counts as resident from then on.
        flags += ["--num-gpu-blocks-override", "512", "--max-model-len", "2048"]
        with serving("demo", folder, *flags, *given.options) as served:
            load = Load(served.url, folder, time.monotonic() + 60 * given.minutes)
            count = max(1, given.clients)
            clients = [threading.Thread(target=load.stream)]
            for number in range(count):
                own = {"asks": given.clients > 0}
                clients.append(
                    threading.Thread(target=load.use, args=(number, names[number::count]), kwargs=own)
                )
            for each in clients:
                each.start()
            memory = []
            for minute in range(1, max(1, int(given.minutes)) + 1):
                time.sleep(min(60.0, max(0.0, load.end - time.monotonic())))
                memory.append(line(load, minute, served.process.pid))
            for each in clients:
                each.join()
        for error in load.errors[:10]:
            print(error)
        return int(bool(load.errors) or (len(memory) > 2 and memory[-1] > 1.05 * memory[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
