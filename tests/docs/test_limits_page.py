"""docs/reference/limits.md: every number is the code's, and every test that it names exists."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from chorale.api.limits import Size
from tests.support import ROOT

PAGE = (ROOT / "docs" / "reference" / "limits.md").read_text("utf-8")
TABLE = PAGE.split("<!-- entry points -->")[1].split("<!-- /entry points -->")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.strip().splitlines()[2:]]
NUMBERS = re.findall(r"(\d+)[^(|\d]*\(`(chorale\.[\w.]+)`\)", TABLE)


def value(name: str) -> Any:
    """The object of a dotted name: of a module, a class (its default) or a dict."""
    parts = name.split(".")
    for number in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:number]))
        except ModuleNotFoundError:
            continue
        for part in parts[number:]:
            if isinstance(found, dict):
                found = found[part]
            else:
                # A dataclass with slots has its defaults in its fields only.
                fields = getattr(found, "__dataclass_fields__", {})
                found = fields[part].default if part in fields else getattr(found, part)
        return found.max if isinstance(found, Size) else found
    raise AssertionError(name)


@pytest.mark.parametrize(("number", "name"), NUMBERS, ids=[name for _, name in NUMBERS])
def test_a_number_is_that_of_the_code(number: str, name: str) -> None:
    assert value(name) == int(number)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_its_limit_its_file_and_its_test(row: list[str]) -> None:
    _, limits, file, tests = row
    assert re.search(r"\(`chorale\.", limits)
    assert (ROOT / file.strip("`")).is_file()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
    assert named
    for path, test in named:
        assert re.search(rf"^(?:async )?def {test}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE), test


def test_every_dotted_name_has_its_number() -> None:
    assert len(NUMBERS) == TABLE.count("`chorale.")
