"""``chorale run-batch``: runs a file of requests on a private engine or on a server, with vLLM's flags."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chorale.config.options.help import help_topic
from chorale.config.options.parse import flag_names
from chorale.config.options.parser import Parser, whole_names
from chorale.config.options.settings import Settings, merge
from chorale.errors import ChoraleError, ConfigError

if TYPE_CHECKING:
    from chorale.cli.commands.serve.batch_job import BatchJob
    from chorale.cli.commands.serve.batch_screen import LineProgress
    from chorale.jobs.files import Destination
    from chorale.jobs.run_file import Journal
    from chorale.requests.openai_client import AsyncClient, Endpoint
    from chorale.store.batch_rows import StoredBatch

CONCURRENCY = 256  # requests in flight at --base-url
INTERRUPTED = 130
_ANY_QUEUE = 2**31 - 1  # a queue without a practical limit
# Options of ``chorale serve`` that also apply with --base-url.
_OF_CLIENTS = frozenset(
    {"api-key", "api-key-file", "config", "uvicorn-log-level", "log-format", "host", "port"}
)


def parser() -> Parser:
    made = Parser(
        "chorale run-batch",
        usage="chorale run-batch -i INPUT -o OUTPUT [MODEL | --base-url URL] [options]",
        description="Run a file of requests in the format of OpenAI's Batch API, one JSON object per line: "
        "chat completions, completions and responses. Starts an engine for it, or uses the server at "
        "--base-url. After an interruption the same command sends only the lines that are missing. "
        "Also takes the options of chorale serve that concern the engine and the model.",
    )
    files = made.add_argument_group("files")
    files.add_argument("-i", "--input-file", required=True, metavar="FILE", help="file or http(s) URL (GET)")
    files.add_argument("-o", "--output-file", required=True, metavar="FILE", help="file or http(s) URL (PUT)")
    files.add_argument(
        "--output-tmp-dir", type=Path, metavar="FOLDER",
        help="folder for the results until they are sent to an output URL (default: the current folder)",
    )  # fmt: skip
    files.add_argument(
        "--restart", action="store_true", help="discard the results of an interrupted run and start again"
    )
    sending = made.add_argument_group("sending")
    sending.add_argument("--base-url", metavar="URL", help="OpenAI-compatible server to use")
    sending.add_argument(
        "--max-concurrency", type=_positive, metavar="N",
        help="maximum number of concurrent requests "
        f"(default: twice --max-num-seqs; {CONCURRENCY} with --base-url)",
    )  # fmt: skip
    shown = made.add_argument_group("progress and metrics")
    shown.add_argument("--enable-metrics", action="store_true", help="serve /metrics at --host and --port")
    shown.add_argument("--url", dest="metrics_host", metavar="HOST", help="older name of --host")
    shown.add_argument(
        "--disable-tqdm", "--no-progress", dest="quiet", action="store_true", help="show no progress"
    )
    return made


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def run(arguments: list[str]) -> int:
    made = parser()
    if help_topic(arguments) is not None:
        print(made.format_help())
        return 0
    given, settings = read_options(made, arguments, os.environ)
    _check(given, settings)
    from chorale.jobs.files import Destination
    from chorale.serve.logs import LogOptions, configure_logging
    from chorale.store.protocol import StoreError

    configure_logging(LogOptions.of(settings.server))
    destination = Destination.of(given.output_file, given.output_tmp_dir)
    with _local(given.input_file, destination.journal.parent) as path:
        try:
            return _run(given, settings, path, destination)
        except StoreError as error:
            raise ChoraleError(f"{destination.journal}: {error.message}") from None


@contextlib.contextmanager
def _local(name: str, folder: Path) -> Iterator[Path]:
    """Yields the path of the input, which is downloaded into ``folder`` for as long as it is needed."""
    from chorale.jobs.files import download, is_url

    if not is_url(name):
        yield Path(name)
        return
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = Path(made, "input.jsonl")
        download(name, path)
        yield path


def _run(given: argparse.Namespace, settings: Settings, path: Path, destination: Destination) -> int:
    """Sends the lines and delivers the output. Removes the journal then, or if no line was sent."""
    from chorale.cli.commands.serve.batch_screen import LineProgress, summary
    from chorale.jobs.run_file import Journal

    target = base_of(given.base_url) if given.base_url else settings.engine.model
    longest = settings.server.max_body_bytes + 65536
    journal = Journal(destination.journal, path, target, max_line_bytes=longest, restart=given.restart)
    begun = ended = journal.batch
    delivered = False
    try:
        progress = LineProgress(begun, quiet=given.quiet)
        if journal.num_before:
            say(f"resumed: {journal.num_before} lines are done")
        try:
            code = (_at_engine if given.base_url is None else _at_url)(given, settings, journal, progress)
        finally:
            seconds = progress.close()
            ended = journal.now()
        if ended.num_done < ended.num_lines:
            if _is_kept(journal, ended):
                say(f"not finished: {ended.num_done} lines are done; the same command sends the others")
            return code or INTERRUPTED
        failures, num_tokens = journal.failures(), ended.tokens.output - begun.tokens.output
        destination.deliver(journal.write_to)
        delivered = True
    finally:
        journal.close(remove=delivered or not _is_kept(journal, ended))
    for line in summary(journal.num_before, ended, failures, num_tokens, seconds):
        say(line)
    say(f"output: {given.output_file}")
    return 1 if ended.num_failed and not ended.num_completed else 0


def _is_kept(journal: Journal, ended: StoredBatch) -> bool:
    """Returns whether the journal has records of sent lines, not only of invalid ones."""
    return journal.num_before > 0 or ended.num_done > journal.batch.num_done


def read_options(
    made: Parser, arguments: list[str], environment: Mapping[str, str]
) -> tuple[argparse.Namespace, Settings]:
    """Returns the command's own options and the settings of its engine. Raises ``ConfigError``."""
    given, rest = made.parse_known_args(whole_names(arguments, flag_names() | made.option_names))
    if given.metrics_host is not None:
        rest = ["--host", given.metrics_host, *rest]
    return given, _offline(merge(rest, environment))


def _check(given: argparse.Namespace, settings: Settings) -> None:
    if given.base_url is None:
        if settings.server.data_parallel_backend == "ray":
            raise ConfigError("--data-parallel-backend ray: run-batch starts engines on this machine only")
        return
    named = [name for name, value in settings.values.items() if value.origin == "command line"]
    without = [f"--{name}" for name in named if name not in _OF_CLIENTS]
    if given.enable_metrics:
        without.append("--enable-metrics")
    if without:
        raise ConfigError(f"{', '.join(without)}: no effect with --base-url, whose server runs the engine")


def _offline(settings: Settings) -> Settings:
    """Returns the settings with the defaults of an engine that has no interactive clients."""
    engine, server, values = settings.engine, settings.server, settings.values
    changes: dict[str, Any] = {"access_log": False, "api_server_count": 1, "uds": None}
    changes |= dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"))  # no line is refused
    if "response-store" not in values:
        changes["response_store"] = ":memory:"
    if server.max_queued_requests is None:
        changes["max_queued_requests"] = _ANY_QUEUE
    if "uvicorn-log-level" not in values:
        changes["log_level"] = "warning"
    delay = 0.0 if engine.prompt_delay is None else engine.prompt_delay
    return dataclasses.replace(
        settings,
        engine=dataclasses.replace(engine, prompt_delay=delay),
        server=dataclasses.replace(server, **changes),
    )


# --------------------------------------------------------------------------- senders


def _at_url(given: argparse.Namespace, settings: Settings, journal: Journal, progress: LineProgress) -> int:
    from chorale.cli.commands.serve.batch_job import BatchJob
    from chorale.requests.openai_client import Endpoint

    key = next(iter(settings.api_keys), None) or os.environ.get("OPENAI_API_KEY")
    job = BatchJob(journal, progress, given.max_concurrency)
    asyncio.run(_send(Endpoint(base_of(given.base_url), key), given.max_concurrency or CONCURRENCY, job))
    return 0


async def _send(endpoint: Endpoint, concurrency: int, job: BatchJob) -> None:
    from chorale.jobs.execute import UrlSender
    from chorale.requests.openai_client import AsyncClient

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, job.stop)
    async with AsyncClient(endpoint, seconds=None, connections=concurrency) as client:
        await _check_server(client)
        await job.send(UrlSender(client), concurrency)


def _at_engine(
    given: argparse.Namespace, settings: Settings, journal: Journal, progress: LineProgress
) -> int:
    from chorale.api.listening import bind_sockets
    from chorale.cli.commands.serve.batch_job import EngineJob
    from chorale.cli.commands.serve.batch_screen import EngineScreen
    from chorale.config.options.speculation import check_served
    from chorale.serve import supervisor
    from chorale.serve.precheck import check_name, check_start

    engine, server = settings.engine, settings.server
    check_served(engine, settings.values)
    check_name(engine)
    check_start(engine, server)
    for notice in settings.notices:
        say(f"note: {notice}")
    sockets = bind_sockets(server) if given.enable_metrics else []
    screen = EngineScreen(settings, sys.stderr)
    job = EngineJob(journal, progress, given.max_concurrency, server, sockets)
    code = supervisor.run(engine, server, screen, job=job)
    if job.failure is not None:
        raise job.failure
    return code


def base_of(url: str) -> str:
    """Returns a base URL without ``/v1``, since the lines' URLs begin with it. Raises ``ConfigError``."""
    from chorale.requests.openai_client import api_url

    return api_url(url, "--base-url").removesuffix("/v1")


async def _check_server(client: AsyncClient) -> None:
    """Raises ``ConfigError`` if the server does not answer or does not accept the key."""
    import httpx2

    where = client.endpoint.where
    try:
        status = (await client.get("/v1/models")).status_code
    except httpx2.HTTPError as error:
        raise ConfigError(f"no server at {where} ({error})") from None
    if status in (401, 403):
        raise ConfigError(f"{where} refuses the key (HTTP {status}): set CHORALE_API_KEY")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
