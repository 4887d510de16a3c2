"""Shows that an engine with little CPU time is not taken for hung, and that a stopped one is replaced.

    python -m benchmarks.serving.starved serve --percent 25 --minutes 10 --every 10

``serve``: one server under a quota. ``ray``: two replicas on Ray, a quota for the processes of each. ``llm``:
``LLM(data_parallel_size=2)``. ``stop``: SIGSTOP of an engine, of a rank, of an API process. ``gaps``: the
longest gap between tokens in the 30 s after ready.

Linux, with a control group for CPU quotas that this user may write (root has one). The demo model; no GPU.
Prints one line of JSON: requests, how many were answered, the slowest of them, and restarts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.ports import free_port
from tests.support.serve.quota import cpu_quota

Enter = Callable[[int], None]
CHORALE = (sys.executable, "-m", "chorale")
MARK = "CHORALE_STARVED"  # environment variable that marks the processes of this run
BODY = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 20}


def ask(url: str, timeout: float = 300.0) -> None:
    data = json.dumps(BODY).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        assert json.load(answer)["choices"]


def keep_asking(minutes: float, every: float, question: Callable[[], None]) -> dict[str, object]:
    """Calls ``question`` every ``every`` seconds for ``minutes`` minutes. Returns counts and failures."""
    end, asked, seconds, failures = time.monotonic() + 60 * minutes, 0, list[float](), list[str]()
    while time.monotonic() < end:
        began = time.monotonic()
        asked += 1
        try:
            question()
            seconds.append(round(time.monotonic() - began, 1))
        except Exception as error:
            failures.append(repr(error)[:200])
        time.sleep(max(0.0, every - (time.monotonic() - began)))
    return {
        "asked": asked,
        "answered": len(seconds),
        "slowest": max(seconds, default=0),
        "failures": failures,
    }


def wait_ready(url: str, seconds: float = 600.0) -> float:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=30).close()
            return round(time.monotonic() - began, 2)
        time.sleep(0.05)
    raise SystemExit("the server was not ready in time")


@contextlib.contextmanager
def server(log: Path, *options: str, enter: Enter = lambda pid: None) -> Iterator[tuple[str, int]]:
    port = free_port()
    command = [*CHORALE, "serve", "demo", "--port", str(port), "--response-store", ":memory:", *options]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=lambda: enter(os.getpid())
        ) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


def hangs(log: Path) -> int:
    """Returns how often a process was killed because it seemed to hang, or ended."""
    text = log.read_text(errors="replace")
    return text.count("hangs (") + text.count("ended with code") + text.count("was killed by")


def serve(options: argparse.Namespace, log: Path) -> dict[str, object]:
    with cpu_quota(options.percent) as enter, server(log, enter=enter) as (url, _):
        ready = wait_ready(url)
        found = keep_asking(options.minutes, options.every, lambda: ask(url))
    return {"ready": ready, **found, "restarts": hangs(log)}


def ray(options: argparse.Namespace, log: Path) -> dict[str, object]:
    """Each replica's processes (its own and its engine) share a quota from their first second on."""
    from tests.support.serve.ray_cluster import ray_cluster, reaped

    with reaped(), ray_cluster(nodes=1, cpus=8) as cluster, contextlib.ExitStack() as stack:
        os.environ["RAY_ADDRESS"] = cluster.address
        more = ("--data-parallel-size", "2", "--data-parallel-backend", "ray", "--device", "cpu")
        url, _ = stack.enter_context(server(log, *more))
        entered = dict[int, Callable[[int], None]]()
        began, ready = time.monotonic(), 0.0
        while not ready and time.monotonic() - began < 600:
            for engine in find("chorale.serve.engine.process"):
                if engine not in entered:
                    entered[engine] = enter = stack.enter_context(cpu_quota(options.percent))
                    enter(engine)
                    enter(parent(engine))
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=30).close()
                ready = time.monotonic() - began
            time.sleep(0.1)
        found = keep_asking(options.minutes, options.every, lambda: ask(url))
        after = find("chorale.serve.engine.process")
    return {
        "ready": round(ready, 1),
        **found,
        "engines": len(entered),
        "restarts": len(set(after) - set(entered)),
    }


LLM = """
import json, sys, time
from benchmarks.serving.starved import keep_asking
from chorale import LLM, SamplingParams
minutes, every = float(sys.argv[1]), float(sys.argv[2])
llm = LLM("demo", data_parallel_size=2)
prompts, sampling = ["17 + 25 ="] * 4, SamplingParams(max_tokens=10)
found = keep_asking(minutes, every, lambda: llm.generate(prompts, sampling, use_tqdm=False))
print(json.dumps({**found, "restarts": sum(each.num_restarts for each in llm._engine._monitors)}))
llm.shutdown()
"""


def llm(options: argparse.Namespace, log: Path) -> dict[str, object]:
    command = [sys.executable, "-c", LLM, str(options.minutes), str(options.every)]
    with cpu_quota(options.percent) as enter, log.open("wb") as errors:
        printed = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, check=True,
            cwd=Path(__file__).parents[2], preexec_fn=lambda: enter(os.getpid()),
        )  # fmt: skip
    return dict(json.loads(printed.stdout.splitlines()[-1]))


def stop(options: argparse.Namespace, log: Path) -> dict[str, object]:
    """Returns the seconds from SIGSTOP to the end of the process, and to the next answer."""
    found = dict[str, object]()
    for name, module, more in (
        ("engine", "chorale.serve.engine.process", ()),
        ("rank", "chorale.serve.engine.rank_entry", ("--tensor-parallel-size", "2")),
        ("api", "chorale.serve.http.api_process", ("--api-server-count", "2")),
    ):
        with server(log, *more) as (url, pid):
            wait_ready(url)
            ask(url)
            victim = next(each for each in find(module) if pid in (parent(each), parent(parent(each))))
            os.kill(victim, signal.SIGSTOP)
            began = time.monotonic()
            while Path(f"/proc/{victim}").exists():
                time.sleep(0.05)
            ended = time.monotonic() - began
            wait_ready(url)
            ask(url)
        found[name] = {"killed": round(ended, 1), "answers": round(time.monotonic() - began, 1)}
    return found


def gaps(options: argparse.Namespace, log: Path) -> dict[str, object]:
    """Streams one answer after another for 30 s. A gap includes waits of this program for a processor."""
    body = {"model": "demo", "prompt": "a b c", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with server(log) as (url, _):
        ready = wait_ready(url)
        end, last, longest, tokens = time.monotonic() + 30, time.monotonic(), 0.0, 0
        while time.monotonic() < end:
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        now = time.monotonic()
                        longest, last, tokens = max(longest, now - last), now, tokens + 1
                        if now > end:
                            break
    return {"ready": ready, "tokens": tokens, "longest_gap": round(longest, 3)}


def find(module: str) -> list[int]:
    """Returns the processes below this program that run ``module``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = f"{MARK}={os.environ[MARK]}\0".encode() in (folder / "environ").read_bytes()
            if is_ours and module.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"serve": serve, "ray": ray, "llm": llm, "stop": stop, "gaps": gaps}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--percent", type=int, default=25, help="CPU quota in percent of one core")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between requests")
    options = parser.parse_args()
    os.environ[MARK] = str(os.getpid())
    log = Path(tempfile.mkdtemp(prefix="starved-"), "log")
    found = parts[options.part](options, log)
    print(json.dumps({"part": options.part, "percent": options.percent, **found, "log": str(log)}))


if __name__ == "__main__":
    main()
