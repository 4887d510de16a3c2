"""Loads and unloads adapters at random while requests run: errors, memory, and the gaps of a stream.

    python -m benchmarks.serving.adapters [--minutes 10] [--adapters 200] [--clients 6] [-- options of serve]

A server of the demo on a CPU. Each client loads one of its adapters, asks it (not with ``--idle``), and
unloads it or leaves it there. One more client streams from the base model. Prints a line a minute: counts,
resident memory of all processes; median, 99th percentile and longest gap between tokens of the stream. The
exit code is 1 after an error, or if memory has grown by 5 % since the second minute.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from chorale.model.config import ModelConfig
from chorale.model.demo import ensure_demo
from tests.support.device.lora import write_adapter
from tests.support.processes import descendants
from tests.support.served import serving

FORMS = ("attention", "attention", "router", "tinker") * 4  # of the folders that the adapters share
# Few pages and host copies: all exist after the first minute.
FLAGS = """--enable-lora --max-loras 8 --max-cpu-loras 16 --allow-runtime-lora-updating --api-server-count 1
--device cpu --response-store :memory: --num-gpu-blocks-override 512 --max-model-len 2048"""


class Load:
    def __init__(self, url: str, folder: Path, end: float = 0.0) -> None:
        self.url, self.folder, self.end = url, folder, end  # monotonic time
        self.count: Counter[str] = Counter()
        self.gaps: list[float] = []  # seconds between tokens of the stream

    def post(self, path: str, **body: Any) -> Any:
        data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, kind), timeout=300)

    def use(self, numbers: range, is_idle: bool) -> None:
        draw, loaded = random.Random(numbers.start), set[int]()
        while time.monotonic() < self.end:
            number = draw.choice(numbers)
            name, folder = f"a{number}", str(self.folder / str(number % len(FORMS)))
            try:
                if number not in loaded:
                    self.post("/v1/load_lora_adapter", lora_name=name, lora_path=folder).close()
                    self.count["loads"] += 1
                    loaded.add(number)
                if not is_idle:
                    self._ask(name, draw)
                if draw.random() < 0.5:
                    self.post("/v1/unload_lora_adapter", lora_name=name).close()
                    loaded.remove(number)
            except Exception as error:
                self.count["errors"] += 1
                print(f"{name}: {error!r}", flush=True)

    def _ask(self, name: str, draw: random.Random) -> None:
        prompt, wanted = draw.sample(range(1000, 5000), draw.randrange(1, 60)), draw.randrange(1, 24)
        body = {"model": name, "prompt": prompt, "max_tokens": wanted, "ignore_eos": True}
        self.count["requests"] += 1
        with self.post("/v1/completions", **body, stream=wanted == 23) as answer:
            if wanted < 23:  # others are left in the middle
                assert json.load(answer)["usage"]["completion_tokens"] == wanted

    def stream(self) -> None:
        body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True}
        while time.monotonic() < self.end:
            with self.post("/v1/completions", **body, stream=True) as answer:
                times = [time.monotonic() for line in answer if line.startswith(b"data: {")]
            self.gaps += [after - before for before, after in pairwise(times)]

    def report(self, minute: int, pid: int) -> float:
        """Prints a line. Returns the MiB of a process and of its descendants."""
        gaps, self.gaps = sorted(self.gaps) or [0.0], []
        pages = (Path(f"/proc/{each}/statm").read_text().split()[1] for each in (pid, *descendants(pid)))
        memory = sum(map(int, pages)) / 256
        shown = (round(1000 * gaps[int(part * (len(gaps) - 1))]) for part in (0.5, 0.99, 1))
        print(f"minute {minute}: {dict(self.count)}, {memory:.0f} MiB, gaps {[*shown]} ms", flush=True)
        return memory


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("options", nargs="*")
    given = parser.parse_args(arguments)
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as where:
        for number, form in enumerate(FORMS):
            write_adapter(Path(where, str(number)), ModelConfig.load(ensure_demo()), form, number)
        with serving("demo", Path(where), *FLAGS.split(), "--lora-dirs", where, *given.options) as served:
            load = Load(served.url, Path(where), time.monotonic() + 60 * given.minutes)
            own = [(range(n, given.adapters, given.clients), given.idle) for n in range(given.clients)]
            clients = [threading.Thread(target=load.use, args=each) for each in own]
            clients.append(threading.Thread(target=load.stream))
            for each in clients:
                each.start()
            for minute in range(1, max(1, int(given.minutes)) + 1):
                time.sleep(min(60.0, max(0.0, load.end - time.monotonic())))
                memory.append(load.report(minute, served.process.pid))
            for each in clients:
                each.join()
    return int(load.count["errors"] > 0 or (len(memory) > 2 and memory[-1] > 1.05 * memory[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
