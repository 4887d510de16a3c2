"""``chorale eval TASK...``: runs tasks against a server and scores the answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from chorale.errors import ChoraleError, ConfigError
from chorale.machine.folders import write_whole
from chorale.machine.signals import signals_as_exceptions
from chorale.requests.openai_client import AsyncClient, Endpoint
from chorale.serve.private_server import reach
from chorale_evals.commands import options
from chorale_evals.commands.progress import Display
from chorale_evals.commands.table import lines
from chorale_evals.journal import Journal
from chorale_evals.manifest import Manifest, TaskInfo, read_manifest
from chorale_evals.record import Key, Record
from chorale_evals.report.page import write_report
from chorale_evals.runner import Plan, Runner
from chorale_evals.session import RETRIES
from chorale_evals.summary import Tally
from chorale_evals.task import Task
from chorale_evals.tasks import make_task


def run(arguments: list[str]) -> int:
    given = options.read(arguments)
    tasks = plan_tasks(given)  # before a server is started, because data may be missing
    serve_arguments = [] if given.base_url is not None else [given.model, *given.serve_arguments]
    again = f"to continue: the same command with --out {given.out}"
    with (
        signals_as_exceptions(),
        Journal(given.out) as journal,
        reach(given.base_url, options.api_key(given), serve_arguments, option="--base-url") as endpoint,
    ):
        try:
            return asyncio.run(_run(given, tasks, journal, endpoint))
        except (KeyboardInterrupt, SystemExit):
            print(f"\ninterrupted; {again}", file=sys.stderr)
            raise
        except ConfigError:
            raise
        except ChoraleError as error:
            raise ChoraleError(f"{error.message}; {again}") from error


def plan_tasks(given: argparse.Namespace) -> list[Task]:
    """Loads the tasks. Raises ``ConfigError`` for an unknown task or missing data."""
    seed = given.seed or 0
    tasks = [make_task(name, data=given.data, limit=given.limit, seed=seed) for name in given.tasks]
    for task in tasks:
        task.repeats = given.repeats or task.repeats
    if len({task.name for task in tasks}) < len(tasks):
        raise ConfigError("two of the files have the same name; rename one")
    return tasks


async def _run(given: argparse.Namespace, tasks: list[Task], journal: Journal, endpoint: Endpoint) -> int:
    async with AsyncClient(
        endpoint, seconds=float(given.timeout), connections=given.max_concurrency, retries=RETRIES
    ) as client:
        entry = await _entry(client, given.model if given.base_url else None)
        plan = Plan(
            tasks, given.effort, str(entry["id"]), given.api, options.fields(given), given.seed,
            given.max_concurrency,
        )  # fmt: skip
        manifest = _manifest(given, plan, entry)
        before = read_manifest(given.out)
        if before is None and given.resume:
            raise ConfigError(f"--resume: {given.out} holds no run")
        records = journal.read()
        if before is None and records:
            raise ConfigError(f"{given.out} holds a journal without run.json")
        (before.continued_by(manifest) if before else manifest).write(given.out)
        results = await _ask(plan, client, journal, records, given)
    return _finish(given, plan, results)


async def _entry(client: AsyncClient, name: str | None) -> dict[str, object]:
    """Returns the model's entry in the server's list, the first entry if no name is given."""
    try:
        entries = {entry["id"]: entry for entry in await client.models()}
    except ChoraleError as error:  # every other request would fail too
        raise ConfigError(error.message) from None
    if not entries or (name is not None and name not in entries):
        known = ", ".join(list(entries)[:10]) or "none"
        raise ConfigError(f"the server has no model {name or ''!r}; it has {known}")
    return entries[name or next(iter(entries))]


def _manifest(given: argparse.Namespace, plan: Plan, entry: dict[str, object]) -> Manifest:
    tasks = {
        task.name: TaskInfo(task.version, task.data_revision, len(task.samples), task.metric, task.notes)
        for task in plan.tasks
    }
    settings = {"model": plan.model, "api": plan.api, "seed": plan.seed, **options.fields(given)}
    return Manifest(settings, entry, tasks, tuple(plan.efforts), given.base_url or "")


async def _ask(
    plan: Plan, client: AsyncClient, journal: Journal, records: dict[Key, Record], given: argparse.Namespace
) -> list[Tally]:
    """Requests all answers that are not final yet and returns the rows of the table."""
    done = {key for key, record in records.items() if record.status == "answered"}
    shown = {(task.name, effort): Tally(task, effort) for task in plan.tasks for effort in plan.efforts}
    wanted = {trial.key for trial in plan.trials()}
    for key in wanted & done:
        shown[key.task, key.effort].add(records[key])
    if wanted & done:
        print(f"{len(wanted & done)} of {len(wanted)} answers are in {given.out} already", file=sys.stderr)
    await Runner(plan, client, journal, Display(shown).add).run(done)
    return list(shown.values())


def _finish(given: argparse.Namespace, plan: Plan, results: list[Tally]) -> int:
    """Writes the summary and the report, and prints the table. Returns 1 if an answer is missing."""
    summary = {"model": plan.model, "results": [tally.to_json() for tally in results]}
    write_whole(given.out / "summary.json", json.dumps(summary, indent=1))
    write_report(given.out)
    if given.json:
        print(json.dumps(summary))
    else:
        print("\n".join(lines(results)))
        print(f"every answer: {given.out / 'report.html'}")
    return int(any(tally.num_failed or tally.num_refused for tally in results))
