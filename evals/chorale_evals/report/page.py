"""Writes the report page: one HTML file that needs no network.

Model output never becomes markup: all data are compressed and in base64 until the page's script inserts them
into the document as text, and the Content-Security-Policy allows no other script, style or address.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from chorale.errors import ConfigError
from chorale.machine.folders import whole_file
from chorale_evals.journal import NAME as JOURNAL
from chorale_evals.journal import records
from chorale_evals.manifest import read_manifest
from chorale_evals.record import Record

NAME = "report.html"
SUMMARY = "summary.json"
_HERE = Path(__file__).parent
_CHUNK_BYTES = 2**18  # approximate size; a chunk is unpacked when one of its answers is opened
_EXCERPT = 120


def write_report(folder: Path) -> Path:
    """Writes the page of a run and returns its path. Raises ``ConfigError`` for a folder without a run."""
    path, head = folder / NAME, _head(folder)
    last = {record.key: offset for offset, record in records(folder / JOURNAL)}
    kept = (record for offset, record in records(folder / JOURNAL) if last[record.key] == offset)
    with whole_file(path) as file:
        page = io.TextIOWrapper(file, encoding="utf-8")
        _write(page, kept, head)
        page.detach()
    return path


def _write(page: TextIO, kept: Iterable[Record], head: dict[str, Any]) -> None:
    style, script, template = ((_HERE / f"page.{kind}").read_text("utf-8") for kind in ("css", "js", "html"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    before, after = template.split("{data}")
    page.write(before.replace("{policy}", html.escape(policy)).replace("{style}", style))
    index: list[list[Any]] = []
    for number, chunk in enumerate(_chunks(kept)):
        index += [[*_entry(record), number, position] for position, record in enumerate(chunk)]
        page.write(_block(f"chunk-{number}", [asdict(record) for record in chunk]))
    page.write(_block("head", head))
    page.write(_block("index", sorted(index, key=lambda row: row[:4])))
    page.write(after.replace("{script}", script))


def _chunks(kept: Iterable[Record]) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    size = 0
    for record in kept:
        chunk.append(record)
        size += len(repr(record))
        if size > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _entry(record: Record) -> list[Any]:
    """Returns the list row of a record: the values shown and filtered without unpacking a chunk."""
    target = record.target if isinstance(record.target, str) else json.dumps(record.target)
    return [
        record.task, record.effort, record.sample, record.repeat, record.group, record.status, record.score,
        int(record.finish == "length"), (record.answer or "")[:_EXCERPT], target[:_EXCERPT],
        record.usage.output,
    ]  # fmt: skip


def _head(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder}: there is no run here (run.json is missing)")
    try:
        summary = json.loads((folder / SUMMARY).read_text("utf-8"))
    except (OSError, ValueError):
        summary = {}
    return {"run": asdict(manifest), "summary": summary}


def _block(name: str, value: Any) -> str:
    data = json.dumps(value, separators=(",", ":")).encode()
    packed = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{packed}</script>\n'


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
