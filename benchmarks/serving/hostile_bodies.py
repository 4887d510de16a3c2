"""Sends hostile bodies during a stream and health checks, to see whether one request delays the others.

    python -m benchmarks.serving.hostile_bodies [--only PART] [--prompts] [--alone] [--json FILE]

Starts ``chorale serve`` on a free port, and in separate processes a client that streams chats without end and
one that requests /health every 5 ms. Then it sends every body of ``BODIES``, one after the other,
and prints a line for each: size, status, seconds, the slowest health check meanwhile (and in the second
before, for comparison), the longest gap between the stream's tokens, the HTTP process's CPU seconds and its
peak resident size. A request is given up (status 0) after ``--patience`` seconds: some bodies are prompts of
many thousand tokens. ``--prompts``: also prompts of given lengths. ``--alone``: without the stream.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import multiprocessing
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx2

from tests.support.served import Served, serving

MIB = 2**20
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
QUESTION = '"messages":[{"role":"user","content":"hi"}],"max_tokens":1'


def chat(more: str) -> bytes:
    return ("{" + QUESTION + "," + more + "}").encode()


def keys(count: int) -> str:
    return "{" + ",".join(f'"k{number}":1' for number in range(count)) + "}"


def listed(value: str, count: int) -> str:
    return "[" + ",".join([value] * count) + "]"


def sealed(count: int, kind: str) -> bytes:
    bomb = "chorale1." + base64.b64encode(zlib.compress(b"a" * (4 * MIB - 1), 9)).decode()
    item = json.dumps(
        {"type": kind, "encrypted_content": bomb, **({"summary": []} if kind == "reasoning" else {})}
    )
    last = '{"role":"user","content":"hi"}'
    return ('{"max_output_tokens":1,"input":[' + ",".join([item] * count + [last]) + "]}").encode()


def tool(schema: str) -> str:
    function = '{"name":"f","parameters":{"type":"object","properties":' + schema + "}}"
    return '"tools":[{"type":"function","function":' + function + "}]"


def parts(count: int) -> bytes:
    content = listed('{"type":"text","text":""}', count)
    return ('{"max_tokens":1,"messages":[{"role":"user","content":' + content + "}]}").encode()


def texts(text: str) -> bytes:
    return ('{"max_tokens":1,"messages":[{"role":"user","content":"' + text + '"}]}').encode()


# name -> (path, body)
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    **{
        f"3: {n} reasoning items": (RESPONSES, lambda n=n: sealed(n, "reasoning")) for n in (1, 25, 100, 2900)
    },
    **{
        f"3: {n} compaction items": (RESPONSES, lambda n=n: sealed(n, "compaction"))
        for n in (1, 25, 100, 2900)
    },
    "4: 1M top-level keys": (CHAT, lambda: chat(keys(1_000_000)[1:-1])),
    "4: 1M keys in metadata": (CHAT, lambda: chat('"metadata":' + keys(1_000_000))),
    "4: 1M keys in a schema": (CHAT, lambda: chat(tool(keys(1_000_000)))),
    "4: 1M keys in logit_bias": (CHAT, lambda: chat('"logit_bias":' + keys(1_000_000))),
    "4: 8M integers in stop": (CHAT, lambda: chat('"stop":' + listed("1", 8_000_000))),
    "4: 5M {} in messages": (CHAT, lambda: b'{"messages":' + listed("{}", 5_000_000).encode() + b"}"),
    "4: 200k empty parts": (CHAT, lambda: parts(200_000)),
    "4: 4M strings in stop": (CHAT, lambda: chat('"stop":' + listed('""', 4_000_000))),
    "4: 5M {} in stop": (CHAT, lambda: chat('"stop":' + listed("{}", 5_000_000))),
    "4: 3M floats": (CHAT, lambda: chat('"stop":' + listed("1.25", 3_000_000))),
    "16k keys in metadata": (CHAT, lambda: chat('"metadata":' + keys(16_384))),
    "16k top-level keys": (CHAT, lambda: chat(keys(16_000)[1:-1])),
    "16k keys in logit_bias": (CHAT, lambda: chat('"logit_bias":' + keys(16_384))),
    "60k {} in messages": (CHAT, lambda: b'{"messages":' + listed("{}", 60_000).encode() + b"}"),
    "60k {} in stop": (CHAT, lambda: chat('"stop":' + listed("{}", 60_000))),
    "60k [] in stop": (CHAT, lambda: chat('"stop":' + listed("[]", 60_000))),
    "130k strings in stop": (CHAT, lambda: chat('"stop":' + listed('"abcdef"', 130_000))),
    "260k integers in stop": (CHAT, lambda: chat('"stop":' + listed("1", 260_000))),
    "260k integers in metadata": (CHAT, lambda: chat('"metadata":' + listed("1", 260_000))),
    "28k x 7 integers in input": (
        RESPONSES,
        lambda: b'{"input":' + listed("[1,2,3,4,5,6,7]", 28_000).encode() + b"}",
    ),
    "16k messages of numbers": (CHAT, lambda: b'{"messages":' + listed("1", 16_384).encode() + b"}"),
    "16k messages without role": (
        CHAT,
        lambda: b'{"messages":' + listed('{"content":"x"}', 16_384).encode() + b"}",
    ),
    "65k empty parts": (CHAT, lambda: parts(65_000)),
    "16k empty messages": (
        CHAT,
        lambda: (
            b'{"max_tokens":1,"messages":' + listed('{"role":"user","content":""}', 16_384).encode() + b"}"
        ),
    ),
    "16k empty messages (Messages)": (
        MESSAGES,
        lambda: (
            b'{"model":"demo","max_tokens":1,"messages":'
            + listed('{"role":"user","content":""}', 16_384).encode()
            + b"}"
        ),
    ),
    "16k empty items": (
        RESPONSES,
        lambda: (
            b'{"max_output_tokens":1,"input":'
            + listed('{"role":"user","content":""}', 16_384).encode()
            + b"}"
        ),
    ),
    "16k properties": (
        CHAT,
        lambda: chat(tool("{" + ",".join(f'"p{n}":{{"type":"string"}}' for n in range(16_000)) + "}")),
    ),
    "60k properties in 4 tools' schemas": (
        CHAT,
        lambda: chat(
            tool(
                "{"
                + ",".join(
                    f'"q{k}":{{"properties":{{' + ",".join(f'"p{n}":{{}}' for n in range(14_000)) + "}}"
                    for k in range(4)
                )
                + "}"
            )
        ),
    ),
    "120k enum": (CHAT, lambda: chat(tool('{"a":{"enum":' + listed('"xx"', 120_000) + "}}"))),
    "deep and wide": (CHAT, lambda: chat('"stop":' + listed("[" * 40 + "]" * 40, 1_600))),
    "16 MB of escapes": (CHAT, lambda: texts("\\n" * 8_000_000)),
    "16 MB of \\u escapes": (CHAT, lambda: texts("\\u00e9" * 2_700_000)),
    "16 MB of a": (CHAT, lambda: texts("a" * 16_000_000)),
    "16 MB of spaces": (CHAT, lambda: texts(" " * 16_000_000)),
    "16 MB of words": (CHAT, lambda: texts("word " * 3_200_000)),
    "16 MB of Chinese": (CHAT, lambda: texts("\u4e2d\u6587" * 2_600_000)),
    "40k numbers of 399 digits": (CHAT, lambda: chat('"stop":' + listed("9" * 399, 40_000))),
    "4k keys of 4 kB": (
        CHAT,
        lambda: chat('"metadata":{' + ",".join(f'"{"k" * 4000}{n}":1' for n in range(4_000)) + "}"),
    ),
    "a key of 16 MB": (CHAT, lambda: chat('"' + "k" * 16_000_000 + '":1')),
    "one key 16k times": (CHAT, lambda: chat('"metadata":{' + ",".join(['"k":1'] * 16_000) + "}")),
    "201k allowed_token_ids": (
        CHAT,
        lambda: chat('"allowed_token_ids":[' + ",".join(map(str, range(201_088))) + "]"),
    ),
    "131k token ids, too long": (
        "/v1/completions",
        lambda: b'{"max_tokens":1,"prompt":' + listed("100", 140_000).encode() + b"}",
    ),
    "256 prompts of 1k ids, all wrong": (
        "/v1/completions",
        lambda: b'{"max_tokens":1,"prompt":' + listed(listed("1000000", 1_000), 256).encode() + b"}",
    ),
    "190k tokens (detokenize)": (
        "/detokenize",
        lambda: b'{"tokens":' + listed("1000", 190_000).encode() + b"}",
    ),
    "16 MB of words (tokenize)": ("/tokenize", lambda: b'{"prompt":"' + b"word " * 3_200_000 + b'"}'),
    "1M keys (tokenize)": ("/tokenize", lambda: b'{"prompt":"a",' + keys(1_000_000)[1:].encode()),
    "1M keys (invocations)": ("/invocations", lambda: b'{"prompt":"a",' + keys(1_000_000)[1:].encode()),
    "1M keys (conversations)": (
        "/v1/conversations",
        lambda: b'{"metadata":' + keys(1_000_000).encode() + b"}",
    ),
    "1M keys (count_tokens)": (
        "/v1/messages/count_tokens",
        lambda: b'{"model":"demo",' + keys(1_000_000)[1:].encode(),
    ),
    "1M signatures' characters": (
        MESSAGES,
        lambda: (
            b'{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":'
            + listed(
                '{"type":"thinking","thinking":"","signature":"cho1.' + "AAAA" * 250_000 + '"}', 15
            ).encode()
            + b"}]}"
        ),
    ),
}


def prompts(count: int, length: int) -> bytes:
    """Returns prompts with different first ids, so that nothing is in the prefix cache."""
    each = [listed(str((length + number) % 100_000), length) for number in range(count)]
    return b'{"max_tokens":1,"prompt":[' + ",".join(each).encode() + b"]}"


PROMPTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    **{
        f"9: a prompt of {n} tokens": ("/v1/completions", lambda n=n: prompts(1, n))
        for n in (1_000, 8_000, 30_000, 100_000, 131_000)
    },
    "9: 16 prompts of 4000 tokens": ("/v1/completions", lambda: prompts(16, 4_000)),
}


@dataclass
class Row:
    name: str
    megabytes: float
    status: int
    seconds: float
    health_ms: float
    idle_ms: float
    gap_ms: float
    cpu_seconds: float
    resident_mib: float


def probe(port: int, pipe: Connection) -> None:
    """Requests /health all the time. Answers a message with the slowest since the last message, in ms."""
    slowest = 0.0
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        while True:
            start = time.perf_counter()
            client.get("/health")
            slowest = max(slowest, time.perf_counter() - start)
            if pipe.poll(0.005):
                if pipe.recv() is None:
                    return
                pipe.send(slowest * 1e3)
                slowest = 0.0


def stream(port: int, pipe: Connection) -> None:
    """Streams one completion after another. Answers a message with the longest gap of tokens, in ms."""
    # A raw completion with ids, so that each token is a separate event, even without text.
    body = {
        "prompt": "Count.",
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 4000,
        "return_token_ids": True,
    }
    longest = 0.0
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        while True:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                before: float | None = None
                for _ in answer.iter_raw():
                    now = time.perf_counter()
                    longest = max(longest, now - before if before is not None else 0.0)
                    before = now
                    if pipe.poll():
                        if pipe.recv() is None:
                            return
                        pipe.send(longest * 1e3)
                        longest = 0.0


def silence(_port: int, pipe: Connection) -> None:
    """Replaces ``stream`` and reports no gap."""
    while pipe.recv() is not None:
        pipe.send(0.0)


class Neighbour:
    """A client process and the pipe to it."""

    def __init__(self, work: Callable[[int, Connection], None], port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(port, theirs), daemon=True)
        self._process.start()

    def worst(self) -> float:
        """Returns the maximum since the last call, in milliseconds."""
        self._pipe.send(True)
        return float(self._pipe.recv()) if self._pipe.poll(120) else float("inf")

    def end(self) -> None:
        self._process.terminate()
        self._process.join(10)


def process_state(pid: int) -> tuple[float, float]:
    """Returns (CPU seconds so far, maximum resident MiB so far)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    peak = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return (int(fields[11]) + int(fields[12])) / 100, int(peak.split()[1]) / 1024


def attack(
    port: int,
    pid: int,
    name: str,
    path: str,
    body: bytes,
    probes: tuple[Neighbour, Neighbour],
    patience: float,
) -> Row:
    health, neighbour = probes
    health.worst(), neighbour.worst()
    time.sleep(1)
    idle = health.worst()
    neighbour.worst()
    cpu = process_state(pid)[0]
    start = time.perf_counter()
    try:
        status = httpx2.post(
            f"http://127.0.0.1:{port}{path}",
            content=body,
            headers={"content-type": "application/json"},
            timeout=patience,
        ).status_code
    except httpx2.HTTPError:
        status = 0  # given up
    seconds = time.perf_counter() - start
    time.sleep(0.2)
    spent, resident = process_state(pid)
    return Row(
        name, len(body) / 1e6, status, seconds, health.worst(), idle, neighbour.worst(), spent - cpu, resident
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", default="", help="only bodies whose names contain this")
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--alone", action="store_true", help="no stream during the requests")
    parser.add_argument(
        "--patience", type=float, default=10.0, help="seconds after which a request is abandoned"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chosen = {**BODIES, **(PROMPTS if given.prompts else {})}
    rows = []
    with tempfile.TemporaryDirectory() as folder, probed(given, Path(folder)) as (served, probes):
        print(f"{'body':35}MB  answer  seconds  health ms  (idle)  gap ms  CPU s  RSS MiB", flush=True)
        time.sleep(2)
        for name, (path, make) in chosen.items():
            if given.only not in name:
                continue
            row = attack(served.port, served.process.pid, name, path, make(), probes, given.patience)
            rows.append(row)
            print(
                f"{name:32s} {row.megabytes:5.1f} {row.status:6d} {row.seconds:8.2f} {row.health_ms:10.1f} "
                f"{row.idle_ms:7.1f} {row.gap_ms:7.0f} {row.cpu_seconds:6.2f} {row.resident_mib:8.0f}",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


@contextlib.contextmanager
def probed(given: argparse.Namespace, folder: Path) -> Iterator[tuple[Served, tuple[Neighbour, Neighbour]]]:
    """Yields a server, the client that requests its health, and the client that streams."""
    with serving(given.model, folder, "--response-store", ":memory:") as served:
        probes = (
            Neighbour(probe, served.port),
            Neighbour(silence if given.alone else stream, served.port),
        )
        try:
            yield served, probes
        finally:
            for each in probes:
                each.end()


if __name__ == "__main__":
    main()
