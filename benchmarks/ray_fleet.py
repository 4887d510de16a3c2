"""Conversations on a Ray cluster of several nodes in processes: failures, prefix hits, cost of routing.

    python benchmarks/ray_fleet.py                     every part: about 15 minutes on two cores
    python benchmarks/ray_fleet.py --parts trouble     2,000 requests while replicas die, come, are updated
    python benchmarks/ray_fleet.py --parts hits        prefix hits: this router, random, one engine
    python benchmarks/ray_fleet.py --parts cost        microseconds of a request for routing

Needs the extra ``ray`` and openai; no GPU. The demo model, 3 nodes, 4 replicas, 2 fronts. Requests are made
with the OpenAI SDK without its retries, every second one streamed, with a seed each, so that the texts of a
run with trouble can be compared with those of a run without.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.ports import free_port
from tests.support.ray_cluster import ray_cluster

WORDS = (
    *("alpha", "bravo", "carol", "delta", "eagle", "fable", "grape"),
    *("hotel", "igloo", "jolly", "kayak", "lemon", "mango", "noble"),
)
APP = "chorale"


@dataclass(frozen=True)
class Talks:
    """The conversations of a run. ``words``: of the first question."""

    count: int
    turns: int
    words: int
    tokens: int
    at_once: int


@dataclass
class Tally:
    requests: int = 0
    failures: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)


def options(replicas: int, fronts: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "demo", "device": "cpu", "data-parallel-size": replicas, "api-server-count": fronts,
        "max-num-seqs": 16, "max-model-len": 4096, "disable-uvicorn-access-log": True, "shutdown-timeout": 60,
        "uvicorn-log-level": "warning", "disable-log-stats": False, **more,
    }  # fmt: skip


def deploy(args: dict[str, Any], policy: str = "prefix", wait: bool = True) -> None:
    from ray import serve

    from chorale.ray import app

    made = app(args)
    engine = made._bound_deployment.init_args[0]._bound_deployment
    engine._deployment_config.request_router_config = type(engine._deployment_config.request_router_config)(
        request_router_class="chorale.ray.router.PrefixRouter", request_router_kwargs={"policy": policy}
    )
    serve._run(made, name=APP, route_prefix="/", _blocking=wait)


def opening(talk: int, words: int) -> str:
    chosen = random.Random(talk)
    return (
        f"Conversation {talk}. " + " ".join(chosen.choice(WORDS) for _ in range(words)) + ". What is 17 + 25?"
    )


async def converse(client: Any, talk: int, talks: Talks, tally: Tally, gate: asyncio.Semaphore) -> None:
    messages: list[dict[str, str]] = []
    for turn in range(talks.turns):
        asked = opening(talk, talks.words) if turn == 0 else f"And {turn} + {talk}?"
        messages.append({"role": "user", "content": asked})
        request = {
            "model": "demo", "messages": messages, "max_tokens": talks.tokens, "temperature": 1,
            "seed": 1000 * talk + turn, "extra_body": {"reasoning_effort": "low"},
        }  # fmt: skip
        async with gate:
            started = time.perf_counter()
            try:
                text, usage = await ask(client, request, streamed=bool((talk + turn) % 2))
            except Exception as error:
                tally.failures.append(f"{talk}/{turn}: {type(error).__name__}: {str(error)[:200]}")
                text, usage = "", None
            tally.seconds.append(time.perf_counter() - started)
        tally.requests += 1
        if usage is not None:
            tally.prompt_tokens += usage.prompt_tokens
            tally.cached_tokens += usage.prompt_tokens_details.cached_tokens
        tally.texts[f"{talk}/{turn}"] = text
        messages.append({"role": "assistant", "content": text or "..."})


async def ask(client: Any, request: dict[str, Any], streamed: bool) -> tuple[str, Any]:
    if not streamed:
        answer = await client.chat.completions.create(**request)
        message = answer.choices[0].message
        return (message.content or "") + (message.reasoning or ""), answer.usage
    text, usage, reason = "", None, None
    stream = await client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            text += (delta.content or "") + (getattr(delta, "reasoning", None) or "")
            reason = choice.finish_reason or reason
    assert reason is not None, "the stream ended without a reason"
    return text, usage


async def talk_all(port: int, talks: Talks, events: Any = None) -> Tally:
    import openai

    tally, gate = Tally(), asyncio.Semaphore(talks.at_once)
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=300
    )
    started = time.perf_counter()
    happening = (
        asyncio.ensure_future(events(tally, talks.count * talks.turns)) if events is not None else None
    )
    await asyncio.gather(*(converse(client, talk, talks, tally, gate) for talk in range(talks.count)))
    if happening is not None:
        print("    all requests are done", flush=True)
        await happening
    tally.seconds.append(time.perf_counter() - started)
    return tally


def facts() -> list[dict[str, Any]]:
    from ray import serve

    called = serve.get_deployment_handle("Engine", APP).broadcast("facts")
    found = called.results(timeout_s=30, return_exceptions=True)
    return [each for each in found if isinstance(each, dict)]  # not of replicas that have just died


async def wait_until_up(port: int, engines: int) -> None:
    import httpx2

    async with httpx2.AsyncClient() as http:
        for _ in range(600):
            try:
                answer = await http.get(f"http://127.0.0.1:{port}/health")
                ready = answer.json() if answer.content else {"engines": [{"status": "ready"}]}
                if sum(each["status"] == "ready" for each in ready.get("engines", [])) >= engines:
                    return
            except (httpx2.HTTPError, json.JSONDecodeError, KeyError):
                pass
            await asyncio.sleep(0.2)
    raise SystemExit("the app is not ready")


class Trouble:
    """What happens while the requests run, by the share of them that is done."""

    def __init__(self, replicas: int, fronts: int) -> None:
        self._replicas, self._fronts = replicas, fronts
        self.log: list[str] = []

    async def __call__(self, tally: Tally, total: int) -> None:
        for share, what in (
            (0.10, self.kill_replica),
            (0.25, self.kill_engine),
            (0.40, self.add),
            (0.60, self.update),
        ):
            while tally.requests < share * total:
                await asyncio.sleep(0.1)
            at = tally.requests
            try:
                said = await asyncio.wait_for(asyncio.to_thread(what), 60)
            except Exception as error:
                said = f"{what.__name__} failed: {error!r}"
            self.log.append(f"after {at} requests: {said}")
            print("   ", self.log[-1], flush=True)

    def busiest(self) -> dict[str, Any]:
        return max(facts(), key=lambda each: each["held"])

    def kill_replica(self) -> str:
        found = self.busiest()
        os.kill(found["replica_pid"], signal.SIGKILL)
        return f"kill -9 of a replica with {found['held']} requests"

    def kill_engine(self) -> str:
        found = self.busiest()
        os.kill(found["pid"], signal.SIGKILL)
        return f"kill -9 of an engine process with {found['held']} requests"

    def add(self) -> str:
        deploy(options(self._replicas + 1, self._fronts), wait=False)
        return f"{self._replicas + 1} replicas wanted"

    def update(self) -> str:
        """A changed option of engines and fronts: every replica of both is replaced."""
        changed = {"max-num-seqs": 24, "shutdown-timeout": 61}
        deploy(options(self._replicas + 1, self._fronts, **changed), wait=False)
        return "the app is updated: every engine and every front is replaced"


def report(name: str, tally: Tally) -> None:
    *each, total = tally.seconds
    ordered = sorted(each)
    print(
        f"{name}: {tally.requests} requests, {len(tally.failures)} failed, {total:.0f} s; "
        f"prefix hits {100 * tally.hit_rate():.1f} % of {tally.prompt_tokens} prompt tokens; request "
        f"p50 {ordered[len(ordered) // 2]:.2f} s, p99 {ordered[int(0.99 * (len(ordered) - 1))]:.2f} s",
        flush=True,
    )
    for line in tally.failures[:10]:
        print("    failed:", line)


async def cost() -> None:
    """What a request costs its front beside Ray's HTTP: the search and ranking, and Ray's assignment."""
    from ray import serve

    from benchmarks.ray_probe import Probe

    engine = serve.get_deployment_handle("Engine", APP)
    probe = serve.run(
        serve.deployment(Probe, ray_actor_options={"num_cpus": 0}).bind(engine),
        name="probe",
        route_prefix=None,
    )
    for tokens in (1024, 16384):
        for at_once in (1, 16):
            found = await probe.measure.remote(tokens, 400, at_once)
            print(
                f"cost of {tokens} prompt tokens, {at_once} at a time: search and rank "
                f"{found['rank']:.0f} us, Ray's assignment and its end {found['assign']:.0f} us of CPU "
                f"({found['wall']:.0f} us elapsed)"
            )
    serve.delete("probe")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="*", default=["hits", "trouble", "cost"])
    parser.add_argument("--talks", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--hit-talks", type=int, default=16)
    parser.add_argument("--words", type=int, default=60, help="of the first question")
    parser.add_argument("--quiet-talks", type=int, default=30)
    parser.add_argument("--hit-words", type=int, default=1500)
    parser.add_argument("--hit-turns", type=int, default=6)
    parser.add_argument("--hit-at-once", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--fronts", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--log", action="store_true")
    given = parser.parse_args()
    talks = Talks(given.talks, given.turns, given.words, given.tokens, given.at_once)
    hits = Talks(given.hit_talks, given.hit_turns, given.hit_words, given.tokens, given.hit_at_once)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ray_cluster(given.nodes, cpus=6, log=given.log):
        from ray import serve

        port = free_port()
        serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})
        if "hits" in given.parts:
            count = given.replicas
            for name, replicas, policy in (
                ("one engine", 1, "prefix"), ("prefix", count, "prefix"), ("random", count, "random")
            ):  # fmt: skip
                deploy(options(replicas, given.fronts), policy)
                await wait_until_up(port, replicas)
                tally = await talk_all(port, hits)
                report(f"hits, {name}", tally)
                serve.delete(APP)
        if "trouble" in given.parts or "cost" in given.parts:
            deploy(options(given.replicas, given.fronts))
            await wait_until_up(port, given.replicas)
        if "cost" in given.parts:
            await cost()
        if "trouble" in given.parts:
            quiet = await talk_all(port, dataclasses.replace(talks, count=given.quiet_talks))
            report("without trouble", quiet)
            trouble = Trouble(given.replicas, given.fronts)
            tally = await talk_all(port, talks, trouble)
            report("trouble", tally)
            same = sum(tally.texts[key] == text for key, text in quiet.texts.items())
            print(f"trouble: {same} of {len(quiet.texts)} texts are those without trouble")
            print("the replicas at the end:", json.dumps(await asyncio.to_thread(facts)))


if __name__ == "__main__":
    asyncio.run(main())
