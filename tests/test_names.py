"""Loggers have the names of their modules, and the glossary refers to existing files and names."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "chorale"

# The loggers that docs/reference/operating.md describes, and the one of uncaught exceptions.
LOGGERS = {"chorale.access", "chorale.stats", "chorale.uncaught"}


@functools.cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def test_loggers_are_named_after_their_module() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
                continue
            if not ast.unparse(node.value.func).endswith("getLogger") or not node.value.args:
                continue
            name = ast.unparse(node.value.args[0])
            assert name == "__name__" or ast.literal_eval(name) in LOGGERS, f"{path}: {name}"
            assert ast.unparse(node.targets[0]).endswith("logger"), path


def glossary() -> list[tuple[str, str]]:
    """Returns (term, where) of every row."""
    lines = (ROOT / "docs" / "reference" / "glossary.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [(row[0], row[2]) for row in rows if row[0] != "term"]


def test_the_glossary_refers_to_existing_files_and_names() -> None:
    source = "\n".join(path.read_text("utf-8") for path in modules())
    names = set(re.findall(r"\w+", source))
    assert len(glossary()) >= 40
    for term, where in glossary():
        for reference in re.findall(r"`([^`]+)`", where):
            if "/" in reference or reference.endswith(".py"):
                assert (PACKAGE / reference).exists(), f"{term}: {reference}"
            else:
                assert set(reference.split(".")) <= names, f"{term}: {reference}"
