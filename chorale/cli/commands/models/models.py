"""``chorale pull MODEL`` and ``chorale list``: checkpoints in the Hugging Face cache, read by ``serve``."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn

from chorale.config.engine import DEMO
from chorale.config.model_names import full_name
from chorale.config.options.parser import Parser
from chorale.errors import ChoraleError, ConfigError
from chorale.machine import facts as machine
from chorale.model.cache import CachedModel, cached_models
from chorale.model.hub import check_family, find_folder, missing_bytes, resolve_model

_STEP = 0.1  # fraction of a download between two progress lines without a terminal


def pull_parser() -> Parser:
    made = Parser(
        "chorale pull",
        usage="chorale pull MODEL [options]",
        description="Download a checkpoint into the Hugging Face cache. An interrupted download is "
        "resumed. HF_TOKEN, HF_HOME and HF_ENDPOINT work as in other Hugging Face tools.",
    )
    made.add_argument(
        "model", metavar="MODEL", help="gpt-oss-20b, gpt-oss-120b, or owner/name of a fine-tune"
    )
    made.add_argument("--revision", metavar="NAME", help="branch, tag or commit")
    made.add_argument(
        "--download-dir",
        metavar="FOLDER",
        help="use this folder instead of the Hugging Face cache (pass it to serve, too)",
    )
    return made


def list_parser() -> Parser:
    made = Parser(
        "chorale list",
        usage="chorale list [options]",
        description="List the gpt-oss checkpoints on this machine, and whether each is complete.",
    )
    made.add_argument("--json", action="store_true", help="print a JSON list")
    made.add_argument(
        "--download-dir", metavar="FOLDER", help="use this folder instead of the Hugging Face cache"
    )
    return made


def run_pull(arguments: list[str]) -> int:
    given = pull_parser().read(arguments)
    local = None if given.model == DEMO else find_folder(given.model)
    if given.model == DEMO or local is not None:
        if given.revision is not None:
            resolve_model(given.model, revision=given.revision)  # raises with the reason
        where = "ships inside the package" if local is None else f"is the folder {local}"
        print(f"{given.model} {where}: nothing to download")
        return 0
    name = full_name(given.model)
    check_family(name, revision=given.revision, download_dir=given.download_dir)
    sizes = missing_bytes(name, revision=given.revision, download_dir=given.download_dir)
    if sizes is not None:
        missing, total = sizes
        cache = given.download_dir or machine.hub_cache()
        print(f"{name}: {_size(total)}, of which {_size(total - missing)} are in {cache} already")
    try:
        folder = _download(name, given.revision, given.download_dir)
    except ConfigError as error:  # a failed download, not a wrong command line
        raise ChoraleError(f"{error.message}; run chorale pull again to resume") from error
    print(f"complete: {folder}")
    more = "".join(
        f" --{flag} {value}"
        for flag, value in (("revision", given.revision), ("download-dir", given.download_dir))
        if value
    )
    print(f"serve it: chorale serve {given.model}{more}")
    return 0


def _download(name: str, revision: str | None, download_dir: str | None) -> Path:
    if not sys.stdout.isatty():
        return resolve_model(name, revision=revision, download_dir=download_dir, progress=_Lines().report)
    with Progress(TextColumn("download"), BarColumn(), TextColumn("{task.description}")) as progress:
        bar = progress.add_task("", total=1.0)
        return resolve_model(
            name,
            revision=revision,
            download_dir=download_dir,
            progress=lambda _, share, message: progress.update(bar, completed=share, description=message),
        )


class _Lines:
    """Prints a line for each tenth of a download."""

    def __init__(self) -> None:
        self._next = _STEP

    def report(self, _: str, share: float, message: str) -> None:
        if share >= self._next:
            print(f"{share:4.0%}  {message}", flush=True)
            self._next = share - share % _STEP + _STEP


def run_list(arguments: list[str]) -> int:
    given = list_parser().read(arguments)
    cache = Path(given.download_dir).expanduser() if given.download_dir else machine.hub_cache()
    found = cached_models(cache)
    if given.json:
        print(json.dumps([_entry(model) for model in found], indent=1))
        return 0
    rows = [("NAME", "REVISION", "SIZE", "DATE", "STATE"), ("demo", "-", "-", "-", "inside the package")]
    rows += [
        (
            model.name,
            f"{model.revision[:12] or '-'}{' (' + ', '.join(model.refs) + ')' if model.refs else ''}",
            _size(model.num_bytes),
            datetime.datetime.fromtimestamp(model.modified).strftime("%Y-%m-%d"),
            "complete" if model.complete else "incomplete (chorale pull resumes it)",
        )
        for model in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if not found:
        print(f"no downloads in {cache}; to get one: chorale pull gpt-oss-20b")
    return 0


def _entry(model: CachedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "revision": model.revision or None,
        "refs": list(model.refs),
        "folder": str(model.folder),
        "bytes": model.num_bytes,
        "weight_bytes": model.total_bytes,
        "modified": datetime.datetime.fromtimestamp(model.modified, datetime.UTC).isoformat(
            timespec="seconds"
        ),
        "complete": model.complete,
    }


def _size(num_bytes: int) -> str:
    """Formats a size in decimal units, as the hub's web pages do."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
