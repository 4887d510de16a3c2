"""``chorale eval parity``: whether two servers, or one before and after a change, compute the same model."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx2

from chorale.config.options.parser import Parser
from chorale.errors import ConfigError
from chorale.machine.folders import write_whole
from chorale.requests.openai_client import AsyncClient, Endpoint
from chorale.serve.private_server import reach
from chorale_evals.commands.options import within
from chorale_evals.commands.progress import Line
from chorale_evals.parity.differences import compare
from chorale_evals.parity.measure import Plan, measure, new_plan, plan_of
from chorale_evals.parity.recording import Recording, load, save
from chorale_evals.parity.result import table, to_json
from chorale_evals.parity.scorer import Scorer
from chorale_evals.parity.verdict import BOUNDS, judge
from chorale_evals.session import RETRIES

# The demo runs on a CPU, where texts of 8192 tokens would take minutes.
LENGTHS, DEMO_LENGTHS = "128,1024,8192", "128,1024"
EXIT_INCONCLUSIVE = 3


def parser() -> Parser:
    made = Parser(
        "chorale eval parity",
        usage="chorale eval parity A B [options]\n       chorale eval parity record A -o FILE [options]",
        description="Compare the log-probabilities and the continuations of two servers, token by token. A "
        "and B are each the URL of a server (http://HOST:PORT/v1), a recording (of chorale eval parity "
        "record), or in quotes the arguments of chorale serve for a private server, which is started, "
        "measured and stopped "
        '("gpt-oss-20b --kv-cache-dtype fp8"). A is the reference: B is judged against the noise of A. '
        "Exit code: 0 as expected, 1 not as expected, 3 inconclusive.",
    )
    made.add_argument("a", metavar="A", help="URL, recording, or arguments of chorale serve")
    made.add_argument("b", metavar="B", help="the same, compared with A")
    expected = "largest difference that passes: rounding only, or a change of precision"
    made.add_argument("--expect", choices=("equal", *BOUNDS), default="equal", help=expected)
    made.add_argument(
        "--out", type=Path, metavar="DIR", help="write both recordings, result.json and report.txt"
    )
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    made.add_argument("--model-b", metavar="NAME", help="model name to send to B")
    made.add_argument("--api-key-b", metavar="KEY", help="API key of B (default: that of A)")
    return _with_common(made)


def record_parser() -> Parser:
    made = Parser(
        "chorale eval parity record",
        usage="chorale eval parity record A -o FILE [options]",
        description="Record a server's log-probabilities for later comparisons, such as before an upgrade.",
    )
    made.add_argument("a", metavar="A", help="URL, or arguments of chorale serve")
    made.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    return _with_common(made)


def _with_common(made: Parser) -> Parser:
    lengths = f"tokens of the texts (default: {LENGTHS}; of the demo {DEMO_LENGTHS})"
    made.add_argument("--lengths", type=_lengths, metavar="N,N", help=lengths)
    for name, most, default, metavar, text in (
        ("texts", 1000, 10, "N", "texts of each length"),
        ("top-k", 20, 5, "K", "candidates of each token"),
        ("tokens", 4096, 64, "N", "tokens of each continuation"),
    ):
        made.add_argument(f"--{name}", type=within(int, 1, most), default=default, metavar=metavar, help=text)
    made.add_argument("--model", "--model-a", dest="model", metavar="NAME", help="model name to send to A")
    made.add_argument("--api-key", metavar="KEY", help="API key of the servers (default: CHORALE_API_KEY)")
    made.add_argument("--quiet", action="store_true", help="show no progress")
    return made


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(within(int, 16, 131_072), text.split(","))))


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
    save(_measured(given, given.a, plan, "A"), given.output)
    tokens = sum(text.length for text in plan.texts)
    print(f"wrote {given.output} ({len(plan.texts)} texts, {tokens:,} tokens)")
    print(f"compare with: chorale eval parity {shlex.quote(str(given.output))} URL")
    return 0


def _compare(given: argparse.Namespace) -> int:
    at_a, at_b = _recording_at(given.a), _recording_at(given.b)
    if at_a is None and at_b is not None:
        raise ConfigError(f"{given.b} is a recording, and B is measured after A: give the recording first")
    out: Path | None = given.out
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    a = load(at_a) if at_a else _measured(given, given.a, _plan(given), "A")
    if out is not None:
        save(a, out / "a.npz")
    b = load(at_b) if at_b else _measured(given, given.b, plan_of(a), "B")
    if out is not None:
        save(b, out / "b.npz")
    return _report(a, b, given)


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _plan(given: argparse.Namespace) -> Plan:
    is_demo = not _is_url(given.a) and _serve_arguments(given.a)[0] == "demo"
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
    """Returns the path if ``source`` is a recording, else None. Raises ``ConfigError`` if it is missing."""
    if _is_url(source):
        return None
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if source.endswith(".npz") and " " not in source:
        raise ConfigError(
            f"{source}: no such recording; write one with: chorale eval parity record URL -o {source}"
        )
    return None


def _measured(given: argparse.Namespace, source: str, plan: Plan, name: str) -> Recording:
    """Measures A or B."""
    model, key = given.model, given.api_key
    if name == "B":
        model, key = given.model_b, given.api_key_b or key
    key = key or os.environ.get("CHORALE_API_KEY") or os.environ.get("VLLM_API_KEY")
    line, done = Line(quiet=given.quiet), 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        line.show(
            lambda: (
                f"{name}  {source or 'demo'}: {done / plan.num_tokens:.0%} of {plan.num_tokens:,} tokens, "
                f"{line.left(done, plan.num_tokens)}"
            ),
            last=done >= plan.num_tokens,
        )

    arguments = [] if _is_url(source) else _serve_arguments(source)
    with reach(source if _is_url(source) else None, key, arguments) as endpoint:
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


async def _text(client: AsyncClient, path: str) -> str:
    """Returns the text at a path that is not under /v1, "" if there is none."""
    try:
        response = await client.get(path)
    except httpx2.HTTPError:
        return ""
    return response.text if response.status_code == 200 else ""


async def _version(client: AsyncClient) -> str | None:
    """Returns the version of a Chorale or vLLM server."""
    found = re.search(r'"version"\s*:\s*"([^"]*)"', await _text(client, "/version"))
    return found[1] if found else None


async def _formats(client: AsyncClient) -> str | None:
    """Returns the number formats of a Chorale server's engines."""
    engines = re.findall(r"^chorale:engine_info{(.*)}", await _text(client, "/metrics"), re.MULTILINE)
    found = {re.sub(r'\b(engine|model_name)="[^"]*",', "", each) for each in engines}
    return " and ".join(sorted(found)) or None
