"""Files of rows: JSON lines, JSON, CSV and Parquet, each read into a list of dictionaries."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

from chorale.errors import ConfigError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz")
MAX_ROWS = 200_000
_MAX_BYTES = 512 * 1024 * 1024
_MAX_FIELD = 1 << 20  # characters of a CSV field; the module's own limit is 131,072


def read_table(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file, read by its ending. Raises ``ConfigError`` with the file's name."""
    try:
        rows = _read(path)
    except (OSError, EOFError, ValueError, csv.Error) as fault:
        raise ConfigError(f"{path} cannot be read: {fault}") from fault
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}: row {number} is not an object")
    return rows


def _read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return _parquet(path)
    with path.open("rb") as file:
        data = gzip.GzipFile(fileobj=file).read(_MAX_BYTES + 1) if path.suffix == ".gz" else file.read()
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
    text = data.decode("utf-8-sig")
    return _csv(text) if path.suffix == ".csv" else _json(text)


def _json(text: str) -> list[Any]:
    """JSON lines, or one array: some publishers give lines the ending .json."""
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    _check_count(len(rows))
    return list(rows)


def _csv(text: str) -> list[dict[str, Any]]:
    limit = csv.field_size_limit(_MAX_FIELD)
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    finally:
        csv.field_size_limit(limit)
    _check_count(len(rows))
    for number, row in enumerate(rows, 1):
        if None in row:
            raise ValueError(f"row {number} has more fields than there are columns")
    return rows


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found]
    except ImportError:
        raise ConfigError(f"{path} is a Parquet file, which needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            _check_count(file.metadata.num_rows)
            rows: list[dict[str, Any]] = file.read().to_pylist()
            return rows
    except ArrowException as fault:
        raise ValueError(fault) from fault


def _check_count(rows: int) -> None:
    if rows > MAX_ROWS:
        raise ValueError(f"{rows:,} rows; at most {MAX_ROWS:,} are read")
