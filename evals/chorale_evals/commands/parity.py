"""``chorale eval parity``: whether two servers, or one before and after a change, compute the same model."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx2

from chorale.config.options.parser import Parser
from chorale.errors import ConfigError
from chorale.machine.folders import write_whole
from chorale.requests.openai_client import AsyncClient, Endpoint
from chorale.serve.private_server import reach
from chorale_evals.commands.progress import duration
from chorale_evals.parity.differences import compare
from chorale_evals.parity.measure import Plan, measure, new_plan, plan_of
from chorale_evals.parity.recording import Recording, load, save
from chorale_evals.parity.result import table, to_json
from chorale_evals.parity.scorer import Scorer
from chorale_evals.parity.verdict import BOUNDS, judge
from chorale_evals.session import RETRIES

LENGTHS, DEMO_LENGTHS = (
    "128,1024,8192",
    "128,1024",
)  # the demo is for a CPU, where the last would take minutes
LINE_SECONDS = 15.0
EXIT_INCONCLUSIVE = 3
DESCRIPTION = (
    "Compare the log-probabilities and the continuations of two servers, token by token. A and B are each "
    "the URL of a server (http://HOST:PORT/v1), a recording (of chorale eval parity record), or in quotes "
    "the arguments of chorale serve for a private server, which is started, measured and stopped "
    '("gpt-oss-20b --kv-cache-dtype fp8"). A is the one to trust: B is judged against its noise. '
    "Exit code: 0 as expected, 1 not as expected, 3 inconclusive."
)


def parser() -> Parser:
    made = Parser(
        "chorale eval parity",
        usage="chorale eval parity A B [options]\n       chorale eval parity record A -o FILE [options]",
        description=DESCRIPTION,
    )
    made.add_argument("a", metavar="A", help="URL, recording, or arguments of chorale serve")
    made.add_argument("b", metavar="B", help="the same, compared with A")
    made.add_argument(
        "--expect",
        choices=("equal", *BOUNDS),
        default="equal",
        help="largest difference that is no failure: rounding only, or that of a precision",
    )
    made.add_argument(
        "--out", type=Path, metavar="DIR", help="write both recordings, result.json and report.txt"
    )
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_common(made)
    made.add_argument(
        "--model-b", metavar="NAME", help="model name to send to B (default: the server's first)"
    )
    made.add_argument("--api-key-b", metavar="KEY", help="API key of B (default: that of A)")
    return made


def record_parser() -> Parser:
    made = Parser(
        "chorale eval parity record",
        usage="chorale eval parity record A -o FILE [options]",
        description="Record what a server says, to compare with later: before an upgrade, for example.",
    )
    made.add_argument("a", metavar="A", help="URL, or arguments of chorale serve")
    made.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    _add_common(made)
    return made


def _add_common(made: Parser) -> None:
    lengths = f"tokens of the texts (default: {LENGTHS}; of the demo {DEMO_LENGTHS})"
    made.add_argument("--lengths", type=_lengths, metavar="N,N", help=lengths)
    made.add_argument("--texts", type=_count(1, 1000), default=10, metavar="N", help="texts of each length")
    made.add_argument("--top-k", type=_count(1, 20), default=5, metavar="K", help="candidates of each token")
    made.add_argument(
        "--tokens", type=_count(1, 4096), default=64, metavar="N", help="tokens of each continuation"
    )
    made.add_argument("--model", "--model-a", dest="model", metavar="NAME", help="model name to send to A")
    made.add_argument("--api-key", metavar="KEY", help="API key of the servers (default: CHORALE_API_KEY)")
    made.add_argument("--quiet", action="store_true", help="show no progress")


def _lengths(text: str) -> tuple[int, ...]:
    try:
        values = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 128,1024") from None
    if not all(16 <= value <= 131_072 for value in values):
        raise argparse.ArgumentTypeError("lengths are 16 to 131072 tokens")
    return values


def _count(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most}, not {text!r}")
        return int(text)

    return read


def run(arguments: list[str]) -> int:
    if arguments[:1] == ["record"]:
        return _record(record_parser().read(arguments[1:]))
    return _compare(parser().read(arguments))


def _record(given: argparse.Namespace) -> int:
    if _recording_at(given.a) is not None:
        raise ConfigError(f"{given.a} is a recording already")
    if not given.output.absolute().parent.is_dir():
        raise ConfigError(f"{given.output}: no such folder")
    plan = _plan(given)
    recording = _measured(given.a, plan, "A", given.model, given.api_key, given.quiet)
    save(recording, given.output)
    tokens = sum(text.length for text in plan.texts)
    print(f"wrote {given.output} ({len(plan.texts)} texts, {tokens:,} tokens)")
    print(f"compare with: chorale eval parity {shlex.quote(str(given.output))} URL")
    return 0


def _compare(given: argparse.Namespace) -> int:
    paths = _recording_at(given.a), _recording_at(given.b)
    if paths[0] is None and paths[1] is not None:
        raise ConfigError(f"{given.b} is a recording, and B is measured after A: give the recording first")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    a = load(paths[0]) if paths[0] is not None else _measured(
        given.a, _plan(given), "A", given.model, given.api_key, given.quiet
    )  # fmt: skip
    if given.out is not None:
        save(a, given.out / "a.json")
    key = given.api_key_b or given.api_key
    b = load(paths[1]) if paths[1] is not None else _measured(
        given.b, plan_of(a), "B", given.model_b, key, given.quiet
    )  # fmt: skip
    if given.out is not None:
        save(b, given.out / "b.json")
    return _report(a, b, given)


def _plan(given: argparse.Namespace) -> Plan:
    is_demo = not given.a.startswith(("http://", "https://")) and _serve_arguments(given.a)[0] == "demo"
    lengths = given.lengths or _lengths(DEMO_LENGTHS if is_demo else LENGTHS)
    return new_plan(lengths, given.texts, given.tokens, given.top_k)


def _report(a: Recording, b: Recording, given: argparse.Namespace) -> int:
    pairs = compare(a, b)
    formats = a.about.get("formats")
    judgement = judge(pairs, formats if formats == b.about.get("formats") else None)
    result = to_json(a, b, pairs, judgement, given.expect)
    lines = "\n".join(table(a, b, pairs, judgement, given.expect))
    print(json.dumps(result, indent=1) if given.json else lines)
    if given.out is not None:
        write_whole(given.out / "result.json", json.dumps(result, indent=1) + "\n")
        write_whole(given.out / "report.txt", lines + "\n")
    if judgement.meets(given.expect):
        return 0
    return EXIT_INCONCLUSIVE if judgement.verdict == "inconclusive" else 1


def _recording_at(source: str) -> Path | None:
    """Returns the path of a recording, or None. Raises ``ConfigError`` if it is missing."""
    if source.startswith(("http://", "https://")):
        return None
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if source.endswith(".json") and " " not in source:
        raise ConfigError(
            f"{source}: no such recording; write one with: chorale eval parity record URL -o {source}"
        )
    return None


def _measured(
    source: str, plan: Plan, name: str, model: str | None, key: str | None, quiet: bool
) -> Recording:
    key = key or os.environ.get("CHORALE_API_KEY") or os.environ.get("VLLM_API_KEY")
    is_url = source.startswith(("http://", "https://"))
    advance = _progress(plan.num_tokens, f"{name}  {source or 'demo'}", quiet)
    with reach(source if is_url else None, key, [] if is_url else _serve_arguments(source)) as endpoint:
        return asyncio.run(measured(endpoint, source or "demo", model, plan, advance))


async def measured(
    endpoint: Endpoint, where: str, model: str | None, plan: Plan, advance: Callable[[int], None]
) -> Recording:
    async with AsyncClient(endpoint, retries=RETRIES) as client:
        model = model or await client.first_model()
        about: dict[str, object] = {
            "where": where,
            "model": model,
            "version": await _version(client),
            "formats": await _formats(client),
            "recorded": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
        return await measure(Scorer(client, model, where, plan.top_k), plan, advance, about)


def _serve_arguments(source: str) -> list[str]:
    try:
        return shlex.split(source) or ["demo"]
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


async def _version(client: AsyncClient) -> str | None:
    """Returns what Chorale and vLLM say at /version, which is beside /v1."""
    try:
        response = await client.get("/version")
        return str(response.json()["version"]) if response.status_code == 200 else None
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        return None


async def _formats(client: AsyncClient) -> str | None:
    """Returns how a Chorale server's engines compute, from /metrics, which is beside /v1."""
    try:
        text = (await client.get("/metrics")).text
    except httpx2.HTTPError:
        return None
    engines = re.findall(r"^chorale:engine_info{(.*)}", text, re.MULTILINE)
    found = {re.sub(r'\b(engine|model_name)="[^"]*",', "", each) for each in engines}
    return " and ".join(sorted(found)) or None


def _progress(total: int, title: str, quiet: bool) -> Callable[[int], None]:
    """Shows the tokens that are done: on a terminal in one line, else in a line every 15 seconds."""
    pause, end = (0.5, "\r") if sys.stderr.isatty() else (15.0, "\n")
    began = shown = time.monotonic()
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done, shown
        done, now = done + tokens, time.monotonic()
        if not quiet and (now - shown >= pause or done >= total):
            shown, left = now, duration((now - began) * (total - done) / done)
            line = f"{title}: {done / total:.0%} of {total:,} tokens, about {left} left"
            print(line.ljust(79), end="\n" if done >= total else end, file=sys.stderr, flush=True)

    return advance
