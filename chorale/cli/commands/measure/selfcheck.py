"""``chorale selfcheck``: checks that this machine computes correct results with a checkpoint and options."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chorale.config.options.parse import flag_names
from chorale.config.options.parser import Parser, whole_names
from chorale.config.options.settings import Settings, merge
from chorale.errors import ConfigError
from chorale.machine.facts import fingerprint
from chorale.machine.folders import write_whole
from chorale.machine.platforms import find_platform
from chorale.machine.signals import signals_as_exceptions
from chorale.measure.selfcheck.check import Check, Outcome, Plan
from chorale.measure.selfcheck.run import run_checks
from chorale.measure.selfcheck.table import CHECKS, select
from chorale.model.config import ModelConfig
from chorale.model.hub import resolve_model
from chorale.runtime.sizing.memory import SMALL_PARAMETERS
from chorale.version import __version__

_MOST_WIDTH = 110
SHOWN = {"ok": "OK", "failed": "FAILED", "skipped": "skipped"}
_CHECKS = {check.name: check for check in CHECKS}
# The private server stores responses in memory only.
_PRIVATE = ("--response-store", ":memory:", "--shutdown-timeout", "0", "--max-logprobs", "20")


def parser() -> Parser:
    made = Parser(
        "chorale selfcheck",
        usage="chorale selfcheck [MODEL] [options] [the options of chorale serve]",
        description="Checks files, kernels and a private server with these options; takes minutes. Each line "
        "of the output describes one check. The exit code is 1 if a check failed. --list shows the checks.",
    )
    made.add_argument("--only", default="", help="names of checks, separated by commas")
    made.add_argument("--skip", default="", help="names of checks to leave out")
    made.add_argument("--quick", action="store_true", help="shorten the checks and skip the longest ones")
    made.add_argument("--json", help="write the results as JSON to this file, or with - to standard output")
    made.add_argument("--list", action="store_true", help="print the checks and exit")
    return made


def run(arguments: list[str]) -> int:
    made = parser()
    given, rest = made.parse_known_args(whole_names(arguments, flag_names() | made.option_names))
    if given.list:
        for check in CHECKS:
            print(f"{check.name:<12} {check.proves}{'' if check.quick else ' (not with --quick)'}")
        return 0
    chosen = select(given.only, given.skip, quick=given.quick)
    settings = merge(rest, os.environ)
    if settings.server.data_parallel_backend == "ray":
        raise ConfigError("chorale selfcheck checks this machine: run it on each machine of a Ray cluster")
    if given.json not in (None, "-") and not Path(given.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {given.json}: no such folder")
    for notice in settings.notices:
        print(f"note: {notice}", file=sys.stderr)
    begin = time.perf_counter()
    screen = _Screen(to_stderr=given.json == "-")
    with signals_as_exceptions():
        plan = _plan(given, rest, settings, chosen)
        screen.say(f"chorale {__version__} selfcheck: {settings.engine.model}, {len(chosen)} checks")
        outcomes = []
        with contextlib.closing(run_checks(plan)) as messages:
            for message in messages:
                screen.show(message)
                if isinstance(message, Outcome):
                    outcomes.append(message)
    seconds = time.perf_counter() - begin
    screen.say(summary(outcomes, seconds))
    if given.json is not None:
        _write(given.json, json.dumps(to_json(outcomes, seconds, settings.engine.model), indent=1))
    return 1 if any(each.verdict == "failed" for each in outcomes) else 0


def _plan(given: argparse.Namespace, rest: list[str], settings: Settings, chosen: tuple[Check, ...]) -> Plan:
    engine, server = settings.engine, settings.server
    model = ModelConfig.load(
        resolve_model(engine.model, revision=engine.revision, download_dir=engine.download_dir)
    )
    has_accelerator = find_platform(engine.device) is not None if engine.device != "cpu" else False
    is_small = model.num_parameters <= SMALL_PARAMETERS
    private = [*rest, *_PRIVATE]
    if server.ssl_cert_reqs:
        private += ["--ssl-cert-reqs", "0"]
    if engine.kv_events_config is not None:
        private += ["--kv-events-config", '{"enable_kv_cache_events": false}']
    return Plan(
        checks=chosen,
        config=engine,
        serve_arguments=private,
        api_key=settings.api_keys[0] if settings.api_keys else None,
        tls=server.ssl_certfile is not None,
        quick=given.quick,
        has_accelerator=has_accelerator,
        is_slow=not has_accelerator and not is_small,
    )


def line(outcome: Outcome, width: int) -> str:
    """Returns an outcome as text: verdict, name, seconds, purpose, result, and a remedy if it failed."""
    check, is_skipped = _CHECKS[outcome.name], outcome.verdict == "skipped"
    head = f"{SHOWN[outcome.verdict]:<8} {outcome.name:<12} {outcome.seconds:7.1f} s  "
    texts = [check.proves, f"not checked: {outcome.detail}" if is_skipped else outcome.detail]
    if outcome.verdict == "failed":
        texts.append(f"to do: {check.remedy}")
    indent = " " * len(head)
    wrapper = textwrap.TextWrapper(
        max(width, len(head) + 30), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    shown = ["".join(c if c.isprintable() else " " for c in text) for text in texts]
    return head + "\n".join(wrapper.fill(text) for text in shown).removeprefix(indent)


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    counts = {name: sum(each.verdict == name for each in outcomes) for name in SHOWN}
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    failed = [each.name for each in outcomes if each.verdict == "failed"]
    end = f"{len(failed)} FAILED: {', '.join(failed)}" if failed else "none failed"
    return f"{counts['ok']} checks passed{skipped}, {end}; {seconds:.0f} s"


def to_json(outcomes: Sequence[Outcome], seconds: float, model: str) -> dict[str, Any]:
    return {
        "kind": "selfcheck",
        "version": __version__,
        "model": model,
        "machine": fingerprint(),
        "seconds": round(seconds, 1),
        "ok": not any(each.verdict == "failed" for each in outcomes),
        "checks": [
            {
                **asdict(each),
                "proves": _CHECKS[each.name].proves,
                "seconds": round(each.seconds, 2),
                "remedy": _CHECKS[each.name].remedy if each.verdict == "failed" else None,
            }
            for each in outcomes
        ],
    }


def _write(target: str, text: str) -> None:
    if target == "-":
        print(text)
        return
    write_whole(Path(target), text)


class _Screen:
    """Prints outcomes as they arrive, and on a terminal the name of the running check."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._stream = sys.stderr if to_stderr else sys.stdout
        self._width = min(_MOST_WIDTH, shutil.get_terminal_size((_MOST_WIDTH, 24)).columns)
        self._shown = ""

    def say(self, text: str) -> None:
        self._clear()
        print(text, file=self._stream, flush=True)

    def show(self, message: Check | Outcome) -> None:
        if isinstance(message, Outcome):
            self.say(line(message, self._width))
        elif self._stream.isatty():
            self._clear()
            self._shown = f"{message.name} ..."
            print(self._shown, end="", file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._shown:
            print("\r" + " " * len(self._shown) + "\r", end="", file=self._stream)
            self._shown = ""
